"""Every error code that Polar gives, with what it means and what to do next: for pages, people and the reference.

Codes are for programs and never change; where one is raised, its sentence says what happened this time. A test holds
this table to the code: no code without a line, no line without a code.
"""

from __future__ import annotations

from typing import NamedTuple


class Remedy(NamedTuple):
    """One code in words."""

    means: str
    do: str


_AGAIN = "Nothing: it is tried again. If it comes back, read the node's log at that time."
_BUG = "This is a bug of Polar's: report it with the lines of the log that name the session."
_LOG = "Read the command's output in the session's logs, and mend the command or the image."
_ENGINE_LOG = "Read the engine's log; `polar doctor` tries the lane's engine as the lane does."
_CONFIG = "Correct evaluator.config, and submit the task again."

REMEDIES: dict[str, Remedy] = {
    # The REST API
    "invalid_spec": Remedy("A task, topology or setting cannot be.", "Correct the fields that `errors` names."),
    "unstorable": Remedy("A value that Postgres cannot hold, such as NUL.", "Take it out of the request."),
    "conflict": Remedy("It exists already, or its state forbids this.", "Read its state first; the sentence names it."),
    "not_found": Remedy(
        "There is no such task, session, node, key or path.", "Look it up in `polar status`, or /docs."
    ),
    "unauthorized": Remedy(
        "No API key came with the request.", "Send `Authorization: Bearer KEY`, or set POLAR_API_KEY."
    ),
    "unknown_key": Remedy(
        "The API key is unknown or revoked.", "Make another at /admin/keys; `polar up` prints its own."
    ),
    "forbidden": Remedy("The API key lacks the scope.", "Use a key with the scope that the sentence names."),
    "too_many_open": Remedy("The key has as much open as it may.", "Ask again after Retry-After."),
    "too_many_open_tasks": Remedy(
        "The key has POLAR_MAX_OPEN_TASKS tasks running.", "Ask again after Retry-After, or raise the limit."
    ),
    "too_many_open_sessions": Remedy(
        "The key's open sessions would exceed POLAR_MAX_OPEN_SESSIONS.",
        "Ask again after Retry-After, or raise the limit.",
    ),
    "idempotency_key_reused": Remedy(
        "This Idempotency-Key came with another body before.", "Use one key for each task, and the same body with it."
    ),
    "task_running": Remedy("A task of this name is still running.", "Wait for it, cancel it, or take another name."),
    "task_cancelled": Remedy(
        "The task was cancelled before it came.", "Submit it under another name, or after five minutes."
    ),
    "cursor_past_end": Remedy(
        "The cursor is past the end of this feed: it is of another database.", "Begin at 0, or rewind the consumer."
    ),
    "not_acceptable": Remedy("Results do not come in this form.", "Accept JSON, JSON lines or Arrow."),
    "arrow_not_installed": Remedy(
        "The API's side lacks pyarrow.", "pip install 'polar-rollout[arrow]' there, or accept JSON lines."
    ),
    "database_unavailable": Remedy("Postgres does not answer.", "Try again; if it lasts, run `polar doctor`."),
    "internal": Remedy("A request broke Polar.", _BUG),
    "not_a_recording": Remedy("Only a recorded session can be closed.", "Cancel it: DELETE /rollout/session/{id}."),
    # The policy and the gate
    "not_holding": Remedy(
        "Some proxies do not hold yet; the gate stays closed.", "Pause again to wait longer, or with mode=abort."
    ),
    "resumed_meanwhile": Remedy("Somebody resumed while this pause waited.", "Agree on who pauses, and pause again."),
    "push_failed": Remedy(
        "An engine has not taken the weights; the gate stays closed.", "Mend what `lanes` names, and push again."
    ),
    "push_running": Remedy("Another push is under way.", "Push again when it has ended."),
    "takes_no_weights": Remedy(
        "An engine takes no weights over HTTP.", "Leave its lane out by `lanes`, and give it the weights yourself."
    ),
    "parity": Remedy(
        "An engine with the new weights scores the probe otherwise than the trainer.",
        "Check path and precision of the checkpoint, and push again; raise parity_alarm only if both are right.",
    ),
    # Time and budgets
    "budget_exhausted": Remedy("The session's time, turns or tokens are used up.", "Give the task more, or let it be."),
    "session_timeout": Remedy("The session's time ran out.", "Raise timeout_seconds if this is common."),
    "max_turns": Remedy("The session has made its model calls.", "Raise max_turns if this is common."),
    "max_session_tokens": Remedy("The session has sampled its tokens.", "Raise max_session_tokens if this is common."),
    # The node
    "polar_error": Remedy("An error without a name of its own.", _BUG),
    "session_error": Remedy("A session ended by an error without a name of its own.", _BUG),
    "node_error": Remedy("The machine failed: disk, database, process.", _AGAIN),
    "bug": Remedy("A stage broke.", _BUG),
    "database_down": Remedy("Postgres was away.", _AGAIN),
    "lost_lease": Remedy("Another worker moved this session on.", "Nothing: whoever holds it goes on."),
    "lost_worker": Remedy("The session's worker was not heard of any more.", _AGAIN),
    "worker_stopped": Remedy("The worker was stopped, and gave the session back.", "Nothing: another takes it."),
    "lost_node": Remedy(
        "The session's node is gone; it was lost with several.", "See why nodes go: `polar status`, then their logs."
    ),
    "proxy_lost": Remedy("The agent failed because its proxy was away.", _AGAIN),
    "no_lane": Remedy("No lane is alive.", "Start a node: `polar serve_gateway`; `polar status` shows what lives."),
    "not_recorded": Remedy("A model call could not be written down, so it was not answered.", _AGAIN),
    "not_recording": Remedy("The proxy is stopping.", "Nothing: the agent asks again, at the new process."),
    # The runtime and the task's own steps
    "runtime_error": Remedy(
        "The sandbox did not start, or broke.", "Run `polar doctor` on the node: it tries each runtime."
    ),
    "state_cannot_be_kept": Remedy(
        "The runtime cannot keep a prepared state.", "Nothing: each session prepares its own; or drop prepare_once."
    ),
    "prepare_failed": Remedy("A step of runtime.prepare failed.", _LOG),
    "source_refused": Remedy(
        "The task reads a path of the node that it may not.", "Put the file into a folder of POLAR_UPLOAD_FROM."
    ),
    # The harness
    "harness_error": Remedy("The agent program failed.", "Read its output in the session's logs."),
    "no_model_calls": Remedy(
        "The agent ended without a model call.",
        "See in its log which address it used; it must be the one it was given.",
    ),
    "not_installed": Remedy(
        "The program is not in the runtime.", "Install it in the image, or leave agent.settings.install on."
    ),
    "install_failed": Remedy(
        "The program could not be fetched.",
        "Let the node reach the index, or install it in the image (install: false).",
    ),
    "no_skills": Remedy("skills_path is no folder inside the runtime.", "Bring it there by runtime.prepare."),
    "not_started_here": Remedy("An external harness is started elsewhere.", "Open its session with POST /sessions."),
    "render_refused": Remedy(
        "The model's renderer cannot print this history.",
        "See in the log what the harness sent; canonical mode may take it.",
    ),
    # The engine
    "engine_error": Remedy("The inference server failed.", _ENGINE_LOG),
    "engine_down": Remedy(
        "No engine answers at its address.", "Start it, or mend base_url; the lane goes on by itself."
    ),
    "engine_timeout": Remedy("The engine took too long.", "Lower max_execute, or raise the engine's timeout_seconds."),
    "engine_cut": Remedy("The engine's answer ended in the middle.", _ENGINE_LOG),
    "engine_aborted": Remedy("The engine gave up a request.", _ENGINE_LOG),
    "engine_refused": Remedy(
        "The engine refused the request.", "The sentence has its words; mend the lane or the task."
    ),
    "engine_contract": Remedy(
        "The engine's answer is not what its kind of server gives.",
        "Check `engine` and the server's version: docs/engines.md.",
    ),
    "engine_setup": Remedy(
        "The lane's engine is described wrongly.", "Mend the lane in topology.yaml as the sentence says."
    ),
    "engine_unfit": Remedy(
        "The engine cannot give what the task needs.", "The sentence has the flag or the field to set."
    ),
    "engine_altered_prompt": Remedy(
        "The engine sampled from another prompt than it was given.", "Turn off what truncates or shifts context there."
    ),
    "no_token_ids": Remedy(
        "Token ids are lost between engine and proxy.", "Take the router away, or have it pass the fields on."
    ),
    "no_tokenizer": Remedy(
        "The node lacks the model's tokenizer.", "Set `tokenizer` of the lane's engine to its folder."
    ),
    "no_score": Remedy("This engine cannot score given tokens.", "Use SGLang or vLLM for parity and replay."),
    "renderer_refused": Remedy(
        "The prompt could not be gone on with.", "See the completion's page; report what was sent."
    ),
    "context_length_exceeded": Remedy(
        "The prompt is longer than the model takes.",
        "Nothing if the harness compacts; else a longer context or fewer turns.",
    ),
    # Builders
    "builder_error": Remedy("Completions could not be put together.", _BUG),
    "duplicate_completion": Remedy("A completion was handed in twice.", _BUG),
    "unaccounted": Remedy("Completions and traces do not add up.", _BUG),
    # Evaluators
    "evaluator_error": Remedy("No verdict could be reached.", "Read the evaluator's log in the session's logs."),
    "evaluator_broke": Remedy("The evaluator's own code broke.", "Read the worker's log; mend the class."),
    "evaluator_timeout": Remedy(
        "The evaluation ran out of time.", "Raise its time-out, or the task's timeout_seconds."
    ),
    "evaluator_stopped": Remedy("The evaluation was stopped.", "Nothing, if the session was cancelled."),
    "trace_rewards_mismatch": Remedy("Another number of rewards than traces.", "Give one for each, or one for all."),
    "bad_reward": Remedy("The reward is not a finite number.", "Mend what prints or writes it."),
    "bad_answer": Remedy("answer_file is no plain file.", _CONFIG),
    "no_runtime": Remedy("The evaluator needs a runtime, and there is none.", "Set refresh_runtime: true."),
    "no_agent_runtime": Remedy("The agent's runtime is gone, and its work with it.", "Submit the task again."),
    "no_base_tree": Remedy("The repository cannot be read or compared.", "Put git into the image; check repo_dir."),
    "no_patch": Remedy("The agent's patch cannot be read.", "Check repo_dir and patch_command; read the log."),
    "not_restored": Remedy("Protected files cannot be put back.", _LOG),
    "command_failed": Remedy("The command must end with 0 for its reward to count.", _LOG),
    "command_not_run": Remedy("The command itself could not run.", _LOG),
    "no_reward_file": Remedy("The command wrote no reward file.", _LOG),
    "old_reward_file": Remedy("An old reward file cannot be removed.", "Put the reward where the command may write."),
    "bad_instance": Remedy("SWE-bench cannot use the instance.", _CONFIG),
    "no_instance": Remedy("The instance cannot be found or fetched.", "Check dataset, split and instance_id."),
    "no_task": Remedy("task_dir is no Harbor task on this node.", "Put the folder on every node, under the same path."),
    "no_tests": Remedy("The task's tests have no test.sh.", "Add it, or set test_command."),
    "no_variable": Remedy("The tests need a variable.", "Set it in evaluator.env."),
    "not_ready": Remedy("The sandbox cannot be made ready for the tests.", _LOG),
    "tests_broke": Remedy("The tests ended with another code than 0.", "Mend them, or leave require_exit_zero off."),
    "unsupported_task": Remedy("This kind of Harbor task is not done.", "Take it apart into tasks of one step."),
    "no_rubric": Remedy("There is no rubric, or an empty one.", "Set criteria, or rubric_file in the tests' folder."),
    "judge_failed": Remedy(
        "The judge gave no usable answer.", "Look at the attempts in the detail; check judge_base_url and the model."
    ),
    "judge_refused": Remedy("The judge's host may not be asked.", "Add it to POLAR_JUDGE_ALLOW."),
    # On a harness's wire, in its dialect's own shape
    "invalid_json": Remedy("The body is not a JSON object.", "Mend the harness's request."),
    "model_not_found": Remedy(
        "The task serves no other model name.", "Use agent.model_name, or set agent.other_models: serve."
    ),
    "item_not_found": Remedy("An item of the Responses API is not stored here.", "Send the item itself."),
    "previous_response_not_found": Remedy("The earlier response is not this session's.", "Send the whole history."),
    "thread_not_found": Remedy("The earlier message is not this session's.", "Send the whole history."),
    "request_timeout": Remedy("The body did not come in time.", "Send it whole within two minutes."),
    "request_too_large": Remedy("The body is larger than POLAR_MAX_BODY_MB.", "Raise the setting, or send less."),
}
