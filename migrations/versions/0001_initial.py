"""Tasks, sessions and their events, completions, trajectories, nodes and lanes, keys, owed webhooks."""

from alembic import op
import sqlalchemy as sa
from sqlalchemy.dialects import postgresql

revision = '0001'
down_revision = None


def upgrade() -> None:
    op.create_table('api_keys',
    sa.Column('id', sa.Uuid(), nullable=False),
    sa.Column('name', sa.Text(), nullable=False),
    sa.Column('key_hash', sa.LargeBinary(), nullable=False),
    sa.Column('scopes', postgresql.JSONB(astext_type=sa.Text()), nullable=False),
    sa.Column('created_at', sa.DateTime(timezone=True), nullable=False),
    sa.Column('revoked_at', sa.DateTime(timezone=True), nullable=True),
    sa.PrimaryKeyConstraint('id'),
    sa.UniqueConstraint('key_hash')
    )
    op.create_table('nodes',
    sa.Column('id', sa.Text(), nullable=False),
    sa.Column('gateway_url', sa.Text(), nullable=False),
    sa.Column('draining', sa.Boolean(), nullable=False),
    sa.Column('heartbeat_at', sa.DateTime(timezone=True), nullable=False),
    sa.Column('created_at', sa.DateTime(timezone=True), nullable=False),
    sa.PrimaryKeyConstraint('id')
    )
    op.create_table('tasks',
    sa.Column('id', sa.Uuid(), nullable=False),
    sa.Column('task_id', sa.Text(), nullable=False),
    sa.Column('current', sa.Boolean(), nullable=False),
    sa.Column('state', sa.Text(), nullable=False),
    sa.Column('spec', postgresql.JSONB(astext_type=sa.Text()), nullable=False),
    sa.Column('priority', sa.Integer(), nullable=False),
    sa.Column('num_samples', sa.Integer(), nullable=False),
    sa.Column('error', sa.Text(), nullable=True),
    sa.Column('created_at', sa.DateTime(timezone=True), nullable=False),
    sa.Column('updated_at', sa.DateTime(timezone=True), nullable=False),
    sa.Column('ended_at', sa.DateTime(timezone=True), nullable=True),
    sa.PrimaryKeyConstraint('id')
    )
    op.create_index('tasks_current_name', 'tasks', ['task_id'], unique=True, postgresql_where=sa.text('current'))
    op.create_index('tasks_recent', 'tasks', ['created_at'], unique=False)
    op.create_table('deliveries',
    sa.Column('id', sa.Uuid(), nullable=False),
    sa.Column('task_pk', sa.Uuid(), nullable=False),
    sa.Column('url', sa.Text(), nullable=False),
    sa.Column('attempts', sa.Integer(), nullable=False),
    sa.Column('next_at', sa.DateTime(timezone=True), nullable=False),
    sa.Column('acknowledged', sa.Boolean(), nullable=False),
    sa.Column('last_error', sa.Text(), nullable=True),
    sa.Column('created_at', sa.DateTime(timezone=True), nullable=False),
    sa.Column('ended_at', sa.DateTime(timezone=True), nullable=True),
    sa.ForeignKeyConstraint(['task_pk'], ['tasks.id'], ondelete='CASCADE'),
    sa.PrimaryKeyConstraint('id')
    )
    op.create_index('deliveries_due', 'deliveries', ['next_at'], unique=False, postgresql_where=sa.text('ended_at IS NULL'))
    op.create_table('lanes',
    sa.Column('name', sa.Text(), nullable=False),
    sa.Column('node_id', sa.Text(), nullable=False),
    sa.Column('engine', postgresql.JSONB(astext_type=sa.Text()), nullable=False),
    sa.Column('max_execute', sa.Integer(), nullable=False),
    sa.Column('ready_buffer', sa.Integer(), nullable=False),
    sa.Column('max_evaluate', sa.Integer(), nullable=False),
    sa.Column('passport', postgresql.JSONB(astext_type=sa.Text()), nullable=False),
    sa.Column('heartbeat_at', sa.DateTime(timezone=True), nullable=False),
    sa.ForeignKeyConstraint(['node_id'], ['nodes.id'], ondelete='CASCADE'),
    sa.PrimaryKeyConstraint('name')
    )
    op.create_table('sessions',
    sa.Column('id', sa.Text(), nullable=False),
    sa.Column('task_pk', sa.Uuid(), nullable=False),
    sa.Column('number', sa.Integer(), nullable=False),
    sa.Column('stage', sa.Text(), nullable=False),
    sa.Column('state', sa.Text(), nullable=False),
    sa.Column('priority', sa.Integer(), nullable=False),
    sa.Column('attempt', sa.Integer(), nullable=False),
    sa.Column('stage_attempts', sa.Integer(), nullable=False),
    sa.Column('execute_attempt', sa.Integer(), nullable=True),
    sa.Column('lane', sa.Text(), nullable=True),
    sa.Column('node_id', sa.Text(), nullable=True),
    sa.Column('worker', sa.Text(), nullable=True),
    sa.Column('lease_until', sa.DateTime(timezone=True), nullable=True),
    sa.Column('woken_at', sa.DateTime(timezone=True), nullable=True),
    sa.Column('queued_at', sa.DateTime(timezone=True), nullable=False),
    sa.Column('claimed_at', sa.DateTime(timezone=True), nullable=True),
    sa.Column('deadline_at', sa.DateTime(timezone=True), nullable=True),
    sa.Column('key_hash', sa.LargeBinary(), nullable=True),
    sa.Column('runtimes', postgresql.JSONB(astext_type=sa.Text()), nullable=False),
    sa.Column('agent_exit', postgresql.JSONB(astext_type=sa.Text()), nullable=True),
    sa.Column('verdict', postgresql.JSONB(astext_type=sa.Text()), nullable=True),
    sa.Column('error', postgresql.JSONB(astext_type=sa.Text()), nullable=True),
    sa.Column('reward', sa.Double(), nullable=True),
    sa.Column('turns', sa.Integer(), nullable=False),
    sa.Column('sampled_tokens', sa.Integer(), nullable=False),
    sa.Column('timing', postgresql.JSONB(astext_type=sa.Text()), nullable=False),
    sa.Column('created_at', sa.DateTime(timezone=True), nullable=False),
    sa.Column('ended_at', sa.DateTime(timezone=True), nullable=True),
    sa.ForeignKeyConstraint(['task_pk'], ['tasks.id'], ondelete='CASCADE'),
    sa.PrimaryKeyConstraint('id')
    )
    op.create_index('sessions_key', 'sessions', ['key_hash'], unique=True, postgresql_where=sa.text('key_hash IS NOT NULL'))
    op.create_index('sessions_leftover', 'sessions', ['node_id'], unique=False, postgresql_where=sa.text("runtimes <> '{}'::jsonb"))
    op.create_index('sessions_of_task', 'sessions', ['task_pk', 'number'], unique=False)
    op.create_index('sessions_open', 'sessions', ['stage', 'state', 'lane'], unique=False, postgresql_where=sa.text('ended_at IS NULL'))
    op.create_table('completions',
    sa.Column('id', sa.Text(), nullable=False),
    sa.Column('seq', sa.BigInteger(), sa.Identity(always=False), nullable=False),
    sa.Column('session_id', sa.Text(), nullable=False),
    sa.Column('attempt', sa.Integer(), nullable=False),
    sa.Column('outcome', sa.Text(), nullable=False),
    sa.Column('parent_id', sa.Text(), nullable=True),
    sa.Column('parent_reason', sa.Text(), nullable=False),
    sa.Column('dialect', sa.Text(), nullable=False),
    sa.Column('role', sa.Text(), nullable=False),
    sa.Column('model_requested', sa.Text(), nullable=False),
    sa.Column('model_used', sa.Text(), nullable=True),
    sa.Column('request', sa.LargeBinary(), nullable=False),
    sa.Column('answer', sa.LargeBinary(), nullable=True),
    sa.Column('parsed', postgresql.JSONB(astext_type=sa.Text()), nullable=False),
    sa.Column('chain_hash', sa.LargeBinary(), nullable=True),
    sa.Column('context_len', sa.Integer(), nullable=False),
    sa.Column('prompt_len', sa.Integer(), nullable=False),
    sa.Column('suffix_ids', sa.LargeBinary(), nullable=False),
    sa.Column('output_ids', sa.LargeBinary(), nullable=False),
    sa.Column('logprobs', sa.LargeBinary(), nullable=True),
    sa.Column('finish_reason', sa.Text(), nullable=True),
    sa.Column('policy_versions', postgresql.JSONB(astext_type=sa.Text()), nullable=False),
    sa.Column('prompt_verified', sa.Boolean(), nullable=True),
    sa.Column('flags', postgresql.JSONB(astext_type=sa.Text()), nullable=False),
    sa.Column('engine', postgresql.JSONB(astext_type=sa.Text()), nullable=False),
    sa.Column('error', postgresql.JSONB(astext_type=sa.Text()), nullable=True),
    sa.Column('requested_at', sa.DateTime(timezone=True), nullable=False),
    sa.Column('finished_at', sa.DateTime(timezone=True), nullable=True),
    sa.Column('delivered', sa.Boolean(), nullable=False),
    sa.ForeignKeyConstraint(['session_id'], ['sessions.id'], ondelete='CASCADE'),
    sa.PrimaryKeyConstraint('id')
    )
    op.create_index('completions_of_session', 'completions', ['session_id', 'attempt', 'seq'], unique=False)
    op.create_table('session_events',
    sa.Column('id', sa.BigInteger(), sa.Identity(always=False), nullable=False),
    sa.Column('session_id', sa.Text(), nullable=False),
    sa.Column('at', sa.DateTime(timezone=True), nullable=False),
    sa.Column('move', sa.Text(), nullable=False),
    sa.Column('stage', sa.Text(), nullable=False),
    sa.Column('state', sa.Text(), nullable=False),
    sa.Column('attempt', sa.Integer(), nullable=False),
    sa.Column('worker', sa.Text(), nullable=True),
    sa.Column('note', postgresql.JSONB(astext_type=sa.Text()), nullable=False),
    sa.ForeignKeyConstraint(['session_id'], ['sessions.id'], ondelete='CASCADE'),
    sa.PrimaryKeyConstraint('id')
    )
    op.create_index('events_of_session', 'session_events', ['session_id', 'id'], unique=False)
    op.create_table('traces',
    sa.Column('session_id', sa.Text(), nullable=False),
    sa.Column('number', sa.Integer(), nullable=False),
    sa.Column('prompt_ids', sa.LargeBinary(), nullable=False),
    sa.Column('response_ids', sa.LargeBinary(), nullable=False),
    sa.Column('loss_mask', sa.LargeBinary(), nullable=False),
    sa.Column('logprobs', sa.LargeBinary(), nullable=True),
    sa.Column('reward', sa.Double(), nullable=True),
    sa.Column('weight', sa.Double(), nullable=False),
    sa.Column('trainable', sa.Boolean(), nullable=False),
    sa.Column('fidelity', sa.Text(), nullable=False),
    sa.Column('certificate', postgresql.JSONB(astext_type=sa.Text()), nullable=False),
    sa.Column('body', sa.LargeBinary(), nullable=False),
    sa.ForeignKeyConstraint(['session_id'], ['sessions.id'], ondelete='CASCADE'),
    sa.PrimaryKeyConstraint('session_id', 'number')
    )
    op.create_table('trajectories',
    sa.Column('session_id', sa.Text(), nullable=False),
    sa.Column('attempt', sa.Integer(), nullable=False),
    sa.Column('builder', sa.Text(), nullable=False),
    sa.Column('meta', postgresql.JSONB(astext_type=sa.Text()), nullable=False),
    sa.Column('error', sa.Text(), nullable=True),
    sa.Column('created_at', sa.DateTime(timezone=True), nullable=False),
    sa.ForeignKeyConstraint(['session_id'], ['sessions.id'], ondelete='CASCADE'),
    sa.PrimaryKeyConstraint('session_id')
    )


def downgrade() -> None:
    op.drop_table('trajectories')
    op.drop_table('traces')
    op.drop_index('events_of_session', table_name='session_events')
    op.drop_table('session_events')
    op.drop_index('completions_of_session', table_name='completions')
    op.drop_table('completions')
    op.drop_index('sessions_open', table_name='sessions', postgresql_where=sa.text('ended_at IS NULL'))
    op.drop_index('sessions_of_task', table_name='sessions')
    op.drop_index('sessions_leftover', table_name='sessions', postgresql_where=sa.text("runtimes <> '{}'::jsonb"))
    op.drop_index('sessions_key', table_name='sessions', postgresql_where=sa.text('key_hash IS NOT NULL'))
    op.drop_table('sessions')
    op.drop_table('lanes')
    op.drop_index('deliveries_due', table_name='deliveries', postgresql_where=sa.text('ended_at IS NULL'))
    op.drop_table('deliveries')
    op.drop_index('tasks_recent', table_name='tasks')
    op.drop_index('tasks_current_name', table_name='tasks', postgresql_where=sa.text('current'))
    op.drop_table('tasks')
    op.drop_table('nodes')
    op.drop_table('api_keys')
