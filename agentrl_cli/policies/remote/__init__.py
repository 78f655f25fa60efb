"""HTTP to inference servers, and a policy on any that speaks OpenAI's completions."""
