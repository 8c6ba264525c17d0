"""The Responses API over the same pipeline that chat completions go through."""
