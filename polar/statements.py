"""What is said in Postgres's own words: statements that do for all of many sessions what would else be done for each.

They belong to the modules that send them, and mean nothing without: moves to `lifecycle`, placing to `placement`.
"""

from __future__ import annotations

from sqlalchemy import DateTime, bindparam, text

# One statement for all that a process holds, in the order in which others lock several sessions.
RENEW = text(
    """
    WITH held AS (
        SELECT s.id FROM sessions s JOIN unnest(CAST(:ids AS text[]), CAST(:attempts AS int[])) AS h(id, attempt)
        ON s.id = h.id AND s.attempt = h.attempt WHERE s.state = :state ORDER BY s.id FOR NO KEY UPDATE OF s
    )
    UPDATE sessions s SET lease_until = clock_timestamp() + make_interval(secs => :seconds)
    FROM held WHERE s.id = held.id RETURNING s.id
    """
)
CANCEL_OPEN = text(
    """
    WITH before AS (
        SELECT id, state, worker,
               coalesce((timing -> stage ->> 'run_ms')::int, 0)
               + greatest(0, round(1000 * extract(epoch FROM :moment - coalesce(claimed_at, :moment))))::int AS run_ms
        FROM sessions WHERE task_pk = :task AND ended_at IS NULL
    ), ended AS (
        UPDATE sessions s
        SET state = :state, ended_at = :moment, lease_until = NULL, worker = NULL, key_hash = NULL,
            error = jsonb_build_object('stage', stage, 'blame', 'cancelled', 'code', 'cancelled', 'message',
                                       CAST(:reason AS text)),
            timing = CASE WHEN before.state <> :running THEN timing ELSE timing || jsonb_build_object(
                stage, coalesce(timing -> stage, '{}') || jsonb_build_object('run_ms', before.run_ms)) END
        FROM before WHERE s.id = before.id
        RETURNING s.id, s.stage, s.attempt, s.error, before.worker
    ), told AS (
        INSERT INTO session_events (session_id, at, move, stage, state, attempt, worker, note)
        SELECT id, :moment, 'cancel', stage, :state, attempt, worker, error FROM ended
    )
    SELECT id FROM ended
    """
).bindparams(bindparam("moment", type_=DateTime(timezone=True)))

# What it costs depends on how much the lanes hold, not on how many sessions or tasks wait. Of the tasks of which no
# lane has anything, and of the others with the smallest shares, no more can be taken than there is room for, and of
# each no more than that of its first sessions. The others matter at all only where the fresh ones do not suffice.
# Whether a task has one waiting is asked with ORDER BY number: without it Postgres takes the table to be well mixed,
# and reads all of it to find the first row of the last task.
PLACE = text(
    """
    WITH busy AS MATERIALIZED (
        SELECT task_pk, count(*) AS held FROM sessions
        WHERE ended_at IS NULL AND (lane IS NOT NULL OR deadline_at IS NOT NULL) AND lane IS NOT NULL GROUP BY task_pk
    ), fresh AS MATERIALIZED (
        SELECT t.id, t.priority FROM tasks t CROSS JOIN LATERAL (
            SELECT FROM sessions WHERE task_pk = t.id AND ended_at IS NULL AND state = :state ORDER BY number LIMIT 1
        ) waiting
        WHERE ended_at IS NULL AND (lanes IS NULL OR lanes ? :lane) AND id NOT IN (SELECT task_pk FROM busy)
        ORDER BY priority DESC, created_at LIMIT :looked_at
    ), by_share AS MATERIALIZED (
        SELECT t.id, b.held FROM busy b JOIN tasks t ON t.id = b.task_pk
        WHERE t.ended_at IS NULL AND (t.lanes IS NULL OR t.lanes ? :lane)
        AND ((SELECT count(*) FROM fresh) < :looked_at OR t.priority > (SELECT min(priority) FROM fresh))
        ORDER BY t.priority DESC, b.held, t.created_at
    ), others AS (
        SELECT o.id, o.held FROM by_share o CROSS JOIN LATERAL (
            SELECT FROM sessions WHERE task_pk = o.id AND ended_at IS NULL AND lane IS NULL AND state = :state
            ORDER BY number LIMIT 1
        ) waiting LIMIT :looked_at
    ), candidates AS (
        SELECT id AS task_pk, 0 AS held FROM fresh UNION ALL SELECT id, held FROM others
    ), ranked AS (
        SELECT w.id, w.priority, w.queued_at, c.held + w.place AS share FROM candidates c CROSS JOIN LATERAL (
            SELECT id, priority, queued_at, row_number() OVER (ORDER BY number) AS place FROM sessions
            WHERE task_pk = c.task_pk AND ended_at IS NULL AND lane IS NULL AND stage = :stage AND state = :state
            ORDER BY number LIMIT :looked_at
        ) w ORDER BY w.priority DESC, share, w.queued_at LIMIT :looked_at
    )
    SELECT s.id FROM ranked r JOIN sessions s ON s.id = r.id
    WHERE s.lane IS NULL AND s.state = :state
    ORDER BY r.priority DESC, r.share, r.queued_at LIMIT :room FOR UPDATE OF s SKIP LOCKED
    """
)
