"""Many nodes: how long the gate was closed, lanes whose engine is down, and what moved sessions left on their nodes."""

from alembic import op
import sqlalchemy as sa
from sqlalchemy.dialects import postgresql

revision = '0005'
down_revision = '0004'


def upgrade() -> None:
    op.add_column('policy', sa.Column('closed_at', sa.DateTime(timezone=True), nullable=True))
    op.add_column('policy', sa.Column('closed_seconds', sa.Float(), server_default='0', nullable=False))
    op.execute("UPDATE policy SET closed_at = clock_timestamp() WHERE gate <> 'open'")
    op.add_column('lanes', sa.Column('engine_down_since', sa.DateTime(timezone=True), nullable=True))
    op.add_column('lanes', sa.Column('engine_error', sa.Text(), nullable=True))
    op.create_table('leftovers',
    sa.Column('id', sa.BigInteger(), sa.Identity(always=False), nullable=False),
    sa.Column('session_id', sa.Text(), nullable=False),
    sa.Column('node_id', sa.Text(), nullable=False),
    sa.Column('handle', postgresql.JSONB(astext_type=sa.Text()), nullable=False),
    sa.Column('created_at', sa.DateTime(timezone=True), nullable=False),
    sa.PrimaryKeyConstraint('id')
    )
    op.create_index('leftovers_of_node', 'leftovers', ['node_id'], unique=False)


def downgrade() -> None:
    op.drop_table('leftovers')
    op.drop_column('lanes', 'engine_error')
    op.drop_column('lanes', 'engine_down_since')
    op.drop_column('policy', 'closed_seconds')
    op.drop_column('policy', 'closed_at')
