"""Answers of our own engines in the forms of OpenAI's and Anthropic's APIs."""
