"""Generation: sampling, verification, the cycle, and the public LLM class."""
