"""What the openhands_sdk preset runs inside: one conversation of an OpenHands agent, in the current folder.

It is run by the Python that has openhands-sdk, not by Polar's, and imports nothing of Polar: `python
openhands_runner.py PLAN INSTRUCTION`. PLAN is the JSON file that openhands_sdk.py writes. It ends with 0 only if
the agent says that it is finished.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path


def main(plan_file: str, instruction_file: str) -> int:
    """Run the conversation; the exit code."""
    from openhands.sdk import LLM, Agent, AgentContext, Conversation, Tool
    from openhands.sdk.context.condenser import LLMSummarizingCondenser
    from openhands.sdk.skills import load_skills_from_dir
    from openhands.tools.file_editor import FileEditorTool
    from openhands.tools.task_tracker import TaskTrackerTool
    from openhands.tools.terminal import TerminalTool

    plan = json.loads(Path(plan_file).read_text())
    llm = LLM(
        usage_id="agent",
        model=os.environ["LLM_MODEL"],
        base_url=os.environ["LLM_BASE_URL"],
        api_key=os.environ["LLM_API_KEY"],
        **plan["llm"],
    )
    skills = Path(plan["skills"])
    found = [skill for kind in load_skills_from_dir(skills) for skill in kind.values()] if skills.is_dir() else []
    agent = Agent(
        llm=llm,
        tools=[Tool(name=tool.name) for tool in (TerminalTool, FileEditorTool, TaskTrackerTool)],
        mcp_config={"mcpServers": plan["mcp_servers"]} if plan["mcp_servers"] else {},
        agent_context=AgentContext(skills=found) if found else None,
        system_prompt_kwargs={"cli_mode": True},
        condenser=LLMSummarizingCondenser(llm=llm.model_copy(update={"usage_id": "condenser"})),
    )
    conversation = Conversation(
        agent=agent,
        workspace=str(Path.cwd()),
        persistence_dir=plan["persistence_dir"],
        max_iteration_per_run=plan["max_turns"],
        delete_on_close=False,
    )
    conversation.send_message(Path(instruction_file).read_text())
    try:
        conversation.run()
        status = conversation.state.execution_status
    finally:
        conversation.close()
    print(f"the conversation ended as {status.value}", file=sys.stderr)
    return 0 if status.value == "finished" else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
