"""A server that speaks OpenAI's protocol: requests over HTTP in, drafted and verified tokens out. It needs `skipsearch[serve]`."""
