"""The dialects that harnesses can speak. Adding one: a file here and a line in the table."""

DIALECTS = {
    "anthropic_messages": "polar.dialects.anthropic_messages:AnthropicMessages",
    "google_generate": "polar.dialects.google_generate:GoogleGenerate",
    "openai_chat": "polar.dialects.openai_chat:OpenAIChat",
    "openai_responses": "polar.dialects.openai_responses:OpenAIResponses",
}
