"""Indexes of the pages' lists: each filter and order has one, so that a page costs the same however many rows there are.

Those of sessions are written when a session begins and when it ends, never by a move between.
"""

from alembic import op
import sqlalchemy as sa

revision = '0009'
down_revision = '0008'


def upgrade() -> None:
    op.create_index('tasks_by_name', 'tasks', [sa.text('(task_id COLLATE "C")'), 'id'])
    op.create_index('tasks_by_state', 'tasks', ['state', 'created_at', 'id'])
    op.create_index('tasks_by_harness', 'tasks', [sa.text("(spec->'agent'->>'harness')"), 'created_at', 'id'])
    op.create_index('tasks_by_evaluator', 'tasks', [sa.text("(spec->'evaluator'->>'strategy')"), 'created_at', 'id'])
    op.create_index('sessions_newest', 'sessions', ['created_at', 'id'])
    op.create_index('sessions_ended_as', 'sessions', ['state', 'ended_at', 'id'],
                    postgresql_include=['reward', 'sampled_tokens'], postgresql_where=sa.text('ended_at IS NOT NULL'))


def downgrade() -> None:
    for name in ('sessions_ended_as', 'sessions_newest'):
        op.drop_index(name, table_name='sessions')
    for name in ('tasks_by_evaluator', 'tasks_by_harness', 'tasks_by_state', 'tasks_by_name'):
        op.drop_index(name, table_name='tasks')
