"""Who sweeps and when last, so that a clock that stopped can be told from one that has nothing to do."""

from alembic import op
import sqlalchemy as sa

revision = '0008'
down_revision = '0007'


def upgrade() -> None:
    op.create_table('beats',
    sa.Column('name', sa.Text(), nullable=False),
    sa.Column('at', sa.DateTime(timezone=True), nullable=False),
    sa.PrimaryKeyConstraint('name')
    )


def downgrade() -> None:
    op.drop_table('beats')
