"""A server for one model, with OpenAI's protocol: requests of many clients go through one engine.

    server.py      the process: its socket, its signals, its end
    web/           the paths, and a request from its body to the last byte of its answer
    protocol/      what requests and answers look like, and what they mean to the engine
    runner.py      the one thread that loads the model and steps its engine
    lanes.py       engines with other methods than the server's own, for requests that name a method
    page/          the playground, a static page
    writing.py     the texts that one request asked for, from that thread to the event loop

FastAPI, uvicorn and prometheus-client are the extra `serve`; nothing outside this folder imports them.
"""
