"""The dialects that harnesses can speak. Adding one: a file here and a line in the table."""

DIALECTS = {
    "openai_chat": "polar.dialects.openai_chat:OpenAIChat",
}
