"""The engines that Polar can talk to. Adding one: a file here and a line in the table."""

ENGINES = {
    "llama_cpp": "polar.engines.llama_cpp:LlamaCppEngine",
    "openai_compatible": "polar.engines.openai_compatible:OpenAICompatibleEngine",
    "sglang": "polar.engines.sglang:SGLangEngine",
    "tiny": "polar.engines.sglang:SGLangEngine",
    "vllm": "polar.engines.vllm:VLLMEngine",
}
