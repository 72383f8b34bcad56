"""Indexes that know who waits and who is taken, so that nothing reads every session; a task's lanes beside its spec."""

from alembic import op
import sqlalchemy as sa
from sqlalchemy.dialects import postgresql

revision = '0007'
down_revision = '0006'


def upgrade() -> None:
    op.add_column('tasks', sa.Column('lanes', postgresql.JSONB(astext_type=sa.Text()),
                                     sa.Computed("nullif(spec -> 'lanes', 'null'::jsonb)", persisted=True), nullable=True))
    op.create_index('tasks_in_order', 'tasks', [sa.text('priority DESC'), 'created_at'], unique=False,
                    postgresql_where=sa.text('ended_at IS NULL'))
    op.create_index('sessions_unended', 'sessions', ['task_pk', 'number'], unique=False,
                    postgresql_where=sa.text('ended_at IS NULL'))
    op.create_index('sessions_taken', 'sessions', ['lane', 'stage', 'state'], unique=False,
                    postgresql_where=sa.text('ended_at IS NULL AND (lane IS NOT NULL OR deadline_at IS NOT NULL)'))
    op.drop_index('sessions_open', table_name='sessions')


def downgrade() -> None:
    op.create_index('sessions_open', 'sessions', ['stage', 'state', 'lane'], unique=False,
                    postgresql_where=sa.text('ended_at IS NULL'))
    op.drop_index('sessions_taken', table_name='sessions')
    op.drop_index('sessions_unended', table_name='sessions')
    op.drop_index('tasks_in_order', table_name='tasks')
    op.drop_column('tasks', 'lanes')
