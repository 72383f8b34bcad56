"""Pictures that harnesses sent, by the hash of their content."""

from alembic import op
import sqlalchemy as sa

revision = '0003'
down_revision = '0002'


def upgrade() -> None:
    op.create_table('media',
    sa.Column('digest', sa.Text(), nullable=False),
    sa.Column('media_type', sa.Text(), nullable=False),
    sa.Column('data', sa.LargeBinary(), nullable=False),
    sa.Column('created_at', sa.DateTime(timezone=True), nullable=False),
    sa.PrimaryKeyConstraint('digest')
    )
    # Pictures are compressed already.
    op.execute('ALTER TABLE media ALTER COLUMN data SET STORAGE EXTERNAL')


def downgrade() -> None:
    op.drop_table('media')
