"""The results feed with its consumers, session callbacks, and who submitted which task.

`tasks.group_id` is `metadata.group_id` under a name that an index can have; rows that are there get theirs here.
"""

from alembic import op
import sqlalchemy as sa

revision = '0004'
down_revision = '0003'


def upgrade() -> None:
    op.create_table('feed',
    sa.Column('id', sa.Integer(), autoincrement=False, nullable=False),
    sa.Column('last', sa.BigInteger(), nullable=False),
    sa.CheckConstraint('id = 1', name='feed_is_one_row'),
    sa.PrimaryKeyConstraint('id')
    )
    op.create_table('consumers',
    sa.Column('name', sa.Text(), nullable=False),
    sa.Column('cursor', sa.BigInteger(), nullable=False),
    sa.Column('created_at', sa.DateTime(timezone=True), nullable=False),
    sa.Column('updated_at', sa.DateTime(timezone=True), nullable=False),
    sa.PrimaryKeyConstraint('name')
    )
    op.add_column('tasks', sa.Column('key_id', sa.Uuid(), nullable=True))
    op.add_column('tasks', sa.Column('idempotency_key', sa.Text(), nullable=True))
    op.add_column('tasks', sa.Column('group_id', sa.Text(), nullable=True))
    op.create_foreign_key('tasks_key_id_fkey', 'tasks', 'api_keys', ['key_id'], ['id'], ondelete='SET NULL')
    op.create_index('tasks_open', 'tasks', ['key_id'], unique=False, postgresql_where=sa.text('ended_at IS NULL'))
    op.create_index('tasks_repeated', 'tasks', ['idempotency_key'], unique=False,
                    postgresql_where=sa.text('idempotency_key IS NOT NULL'))
    op.create_index('tasks_group', 'tasks', ['group_id'], unique=False, postgresql_where=sa.text('group_id IS NOT NULL'))
    op.create_index('tasks_name', 'tasks', ['task_id'], unique=False)
    op.execute("UPDATE tasks SET group_id = spec->'metadata'->>'group_id' WHERE spec->'metadata' ? 'group_id'")
    op.add_column('sessions', sa.Column('feed_number', sa.BigInteger(), nullable=True))
    op.create_index('sessions_feed', 'sessions', ['feed_number'], unique=True,
                    postgresql_where=sa.text('feed_number IS NOT NULL'))
    op.create_index('sessions_unnumbered', 'sessions', ['ended_at', 'id'], unique=False,
                    postgresql_where=sa.text('ended_at IS NOT NULL AND feed_number IS NULL'))
    op.add_column('deliveries', sa.Column('session_id', sa.Text(), nullable=True))
    op.create_foreign_key('deliveries_session_id_fkey', 'deliveries', 'sessions', ['session_id'], ['id'], ondelete='CASCADE')


def downgrade() -> None:
    op.drop_constraint('deliveries_session_id_fkey', 'deliveries', type_='foreignkey')
    op.execute('DELETE FROM deliveries WHERE session_id IS NOT NULL')
    op.drop_column('deliveries', 'session_id')
    op.drop_index('sessions_unnumbered', table_name='sessions')
    op.drop_index('sessions_feed', table_name='sessions')
    op.drop_column('sessions', 'feed_number')
    op.drop_index('tasks_name', table_name='tasks')
    op.drop_index('tasks_group', table_name='tasks')
    op.drop_index('tasks_repeated', table_name='tasks')
    op.drop_index('tasks_open', table_name='tasks')
    op.drop_constraint('tasks_key_id_fkey', 'tasks', type_='foreignkey')
    op.drop_column('tasks', 'group_id')
    op.drop_column('tasks', 'idempotency_key')
    op.drop_column('tasks', 'key_id')
    op.drop_table('consumers')
    op.drop_table('feed')
