"""The front door: any OpenAI client's requests, from admission to the end of the answer."""
