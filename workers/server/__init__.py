"""Our own engines over HTTP, in the forms of OpenAI's and Anthropic's APIs."""
