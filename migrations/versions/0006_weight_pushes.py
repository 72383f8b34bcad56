"""Weight pushes, a row for each lane."""

from alembic import op
import sqlalchemy as sa
from sqlalchemy.dialects import postgresql

revision = '0006'
down_revision = '0005'


def upgrade() -> None:
    op.create_table('weight_pushes',
    sa.Column('push_id', sa.Uuid(), nullable=False),
    sa.Column('lane', sa.Text(), nullable=False),
    sa.Column('node_id', sa.Text(), nullable=False),
    sa.Column('version', sa.Text(), nullable=False),
    sa.Column('path', sa.Text(), nullable=False),
    sa.Column('probe', postgresql.JSONB(astext_type=sa.Text()), nullable=True),
    sa.Column('state', sa.Text(), nullable=False),
    sa.Column('error', sa.Text(), nullable=True),
    sa.Column('difference', sa.Double(), nullable=True),
    sa.Column('seconds', sa.Double(), nullable=True),
    sa.Column('claimed_by', sa.Text(), nullable=True),
    sa.Column('claimed_at', sa.DateTime(timezone=True), nullable=True),
    sa.Column('created_at', sa.DateTime(timezone=True), server_default=sa.text('clock_timestamp()'), nullable=False),
    sa.Column('ended_at', sa.DateTime(timezone=True), nullable=True),
    sa.PrimaryKeyConstraint('push_id', 'lane')
    )
    op.create_index('weight_pushes_unfinished', 'weight_pushes', ['node_id'], unique=False,
                    postgresql_where=sa.text("state IN ('queued', 'running')"))


def downgrade() -> None:
    op.drop_table('weight_pushes')
