"""A server that speaks OpenAI's protocol. It needs `skipsearch[serve]`.

Many requests wait and one thread decodes. A request passes through these modules:

    app           the routes: HTTP in, HTTP out
    auth          checks the API key
    protocol      parses the request and rejects fields that it does not support, by name
    tools         renders tools and a conversation into the prompt
    service       makes jobs for the scheduler from a request
    scheduler     the thread that decodes: a round of each running request in turn
    prefix_pool   K/V of earlier requests, for later ones with the same key
    prefix_disk   K/V of earlier prompts on a disk
    responses     makes OpenAI's responses and events from the rounds
    answer_parts  what other APIs than chat completions share
    openai_responses, anthropic_messages   those APIs, translated into chat completions
    model_facts   what programs ask about the model and its tokenizer
    logprobs      log-probabilities of tokens, if a request asks for them
    penalties     processors for OpenAI's penalties, biases and min_p

    server        runs all of it until SIGTERM or Ctrl-C
    cors          lets pages of other sites call the server, if `--cors` names them
    connections   limits open connections and slow clients
    limits        the limits of a server
    metrics       Prometheus metrics; they contain no text of a request
    page          the page at `/`
    api_errors    `APIError`: an HTTP status with a body in OpenAI's form
"""
