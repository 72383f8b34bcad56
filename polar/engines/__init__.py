"""The engines that Polar can talk to. Adding one: a file here and a line in the table."""

ENGINES = {
    "sglang": "polar.engines.sglang:SGLangEngine",
    "tiny": "polar.engines.sglang:SGLangEngine",
}
