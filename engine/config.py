"""The configuration tree of headrace: one typed section a concern, filled by ops/settings.py from command
line, environment and file.

Flags carry vLLM's names where vLLM has the option. `docs/configuration.md` is generated from here.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from gpu.config import CacheConfig, ModelConfig, ParallelConfig, option


@dataclass
class SchedulerConfig:
    max_num_batched_tokens: int | None = option(
        None, "most tokens of a step; default: 128 to 512 on a CPU, by its measured speed; 2048 to 16384 on GPUs, by their memory"
    )
    max_num_seqs: int | None = option(None, "most requests that run at once; default: 128 on a CPU, 256 to 1024 on GPUs")
    long_prefill_token_threshold: int = option(
        0, "most tokens of one prompt in a step while other requests wait or run; 0: no limit"
    )
    scheduling_policy: str = option(
        "fcfs",
        "order of waiting requests, in Redis and in the engine; fcfs: first come, first served; "
        "priority: lower values first, then arrival; engines that share a queue need the same policy",
        choices=("fcfs", "priority"),
    )
    async_scheduling: bool = option(True, "plan a step while its predecessor runs; needs worker processes")
    watchdog_timeout: float = option(
        20.0,
        "seconds after which an engine ends, and is replaced, whose step takes ten times its forecast, or whose loop plans nothing "
        "or stands still; its first 16 steps may take 300, for their kernels may be compiled; 0: it is not ended",
    )
    enable_chunked_prefill: bool = option(True, "accepted for vLLM's sake; prompts are always computed in chunks")
    shrink_chunks: bool = option(False, "if blocks are short for a whole chunk of a prompt, compute the part that fits")
    watermark: float = option(0.0, "share of the KV blocks that admission keeps free, from 0 to 1")


@dataclass
class RedisConfig:
    redis_url: str = option(
        "",
        "Redis to use: redis://, rediss:// (TLS), unix:// or redis+sentinel:// (docs/operating.md); "
        "empty: `serve` starts an embedded Valkey",
    )
    failover_timeout: float = option(60.0, "seconds that requests wait for another engine after the last one died or left")
    data_dir: str = option("", "folder of the embedded Valkey and its append-only file; default: ~/.local/share/headrace")


@dataclass
class ApiConfig:
    host: str = option("127.0.0.1", "address to listen on; without keys only loopback is allowed")
    port: int = option(8000, "port to listen on; 0: any free port")
    uds: str = option("", "path of a Unix socket to listen on, instead of --host and --port")
    root_path: str = option("", "path under which a proxy shows the server; requests may come with it or without")
    ssl_keyfile: str = option("", "file with the private key of --ssl-certfile")
    ssl_certfile: str = option("", "file with the certificate chain; the server then speaks HTTPS")
    api_server_count: int = option(1, "number of API server processes; they share one listening socket")
    api_key: list[str] = option(
        list,
        "NAME=KEY: the key allows inference; NAME:admin=KEY: it also allows listing, inspecting and aborting "
        "others' requests; repeatable",
    )
    api_key_file: str = option(
        "",
        "file with more keys, one a line in the same form; NAME=sha256:HASH has the key's SHA-256 instead; "
        "it is read again when it changes",
    )
    allow_no_auth: bool = option(False, "allow an address that is not loopback without keys")
    served_model_name: list[str] = option(
        list,
        "names of the model for clients; default: the name of its file or directory, or of its repository in a "
        "Hugging Face cache; repeatable",
    )
    chat_template: str | None = option(None, "file with a Jinja chat template that replaces the model's own")
    trust_request_chat_template: bool = option(False, "allow requests to bring their own chat template")
    special_tokens_in_messages: bool = option(
        False, "let the text of messages spell special tokens, such as <|im_end|>, which can forge turns"
    )
    default_chat_template_kwargs: str | None = option(None, "JSON object with variables for every chat template")
    tool_call_parser: str = option(
        "auto",
        "format in which the model writes tool calls; auto: what its chat template contains, which the API server logs at its "
        "start; none: requests with tools are a 400",
        choices=(
            "auto",
            "none",
            "qwen3_coder",
            "glm",
            "minimax",
            "hermes",
            "gemma",
            "functiongemma",
            "mistral",
            "mistral_list",
            "pythonic",
            "llama3_json",
        ),
    )
    reasoning_parser: str = option(
        "auto",
        "marks between which the model writes reasoning before its answer; auto: what its chat template contains; "
        "none: reasoning stays in the content",
        choices=("auto", "none", "think", "mistral"),
    )
    max_num_queued_reqs: int | None = option(
        None, "most choices that wait or run for a model; a request beyond them is a 503 with Retry-After, or a 429"
    )
    max_num_queued_tokens: int | None = option(
        None, "most prompt tokens that wait for a model; a request beyond them is a 503 with Retry-After, or a 429"
    )
    max_queue_seconds: float = option(
        180.0,
        "longest time that a request may have to wait for an engine, by the engines' measured pace; a request beyond that is a 503 "
        "with Retry-After, or a 429; 0: no limit",
    )
    default_timeout: float = option(
        0.0, "seconds after which a request that names no `timeout` ends with an error, however far it is; 0: never"
    )
    default_queue_timeout: float = option(
        0.0, "seconds that a request without a `queue_timeout` may wait for an engine before it ends with an error; 0: any time"
    )
    tenant_weight: list[str] = option(
        list, "NAME=WEIGHT: share of a key's tenant in the engines and in the queue, against the others' 1; repeatable"
    )
    priority_tenant: list[str] = option(
        list,
        "NAME: a key's tenant that may ask for the service tier `priority`; repeatable. Without keys everybody may",
    )
    record_retention: int = option(3600, "seconds for which the record of an ended request is kept, whichever process ended it")
    resumable_grace: float = option(
        60.0, "seconds that a resumable request, or one with an Idempotency-Key, goes on when no client listens to it"
    )
    max_resumable_grace: float = option(3600.0, "longest such time that a request may ask for; a longer one is a 400")
    max_request_bytes: int = option(64 * 1024 * 1024, "largest request body in bytes; a larger one is a 413")
    max_n: int = option(16384, "largest n of a request; a larger one is a 400")
    max_prompts: int = option(1024, "most prompts of one completion request; more are a 400")
    max_choices: int = option(4096, "most choices of one request, its prompts times n; more are a 400")
    max_request_logprobs: int = option(
        4 * 1024 * 1024,
        "most logprobs of one request: of its prompts' tokens and of all that it may generate, each token with its alternatives; "
        "more are a 400; each takes 8 bytes in the engine and in Redis and about 150 in the API server",
    )
    max_stop_strings: int = option(4, "most stop strings of a request; more are a 400")
    max_bad_words: int = option(128, "most token sequences of a request's bad_words; more are a 400")
    request_timeout: float = option(
        30.0, "seconds in which a client must begin its first request, send a header, and send each MiB of a body"
    )
    # longer than httpx, and so the openai package, keeps one (5 s): it would send into a connection that is being closed
    keep_alive_timeout: int = option(7, "seconds after which a connection without a further request is closed")
    slow_client_timeout: float = option(
        60.0,
        "seconds after which a client is hung up on, and its request aborted, that takes nothing of the output that waits for it; "
        "0: never",
    )
    max_pending_bytes: int = option(
        256 * 1024 * 1024,
        "most memory, about, for output that waits in an API server for clients which read more slowly than it is made; "
        "beyond it the client with most is hung up on",
    )
    sse_keep_alive_interval: float = option(15.0, "seconds between the comments that keep a stream's connection open; 0: none")
    allowed_origins: list[str] = option(list, "origins that CORS allows; repeatable")
    return_tokens_as_token_ids: bool = option(False, "show tokens in logprobs as token_id:N")
    enable_prompt_tokens_details: bool = option(False, "report cached prompt tokens in usage")
    enable_per_request_metrics: bool = option(False, "send times of the request in its answer, as `metrics`")
    enable_tokenizer_info_endpoint: bool = option(False, "serve /tokenizer_info: tokenizer configuration and chat template")
    enable_force_include_usage: bool = option(False, "send usage in every stream, also if the request does not ask for it")
    enable_request_id_headers: bool = option(True, "send X-Request-Id in every response")
    disable_fastapi_docs: bool = option(False, "serve no /docs, /redoc and /openapi.json")
    metrics_prefix: str = option("headrace", "first word of metric names; vllm: for dashboards made for vLLM")
    shutdown_timeout: float = option(
        0.0, "seconds that running requests get after SIGTERM; then API servers abort them, and engines hand them over"
    )

    @property
    def asks_for_keys(self) -> bool:
        return bool(self.api_key or self.api_key_file)


@dataclass
class LogConfig:
    log_level: str = option("info", "lowest level that is logged", choices=("debug", "info", "warning", "error"))
    log_format: str = option("auto", "auto: text on a terminal, else json", choices=("auto", "json", "text"))


@dataclass
class EngineConfig:
    """The configuration of one engine process."""

    model: ModelConfig = field(default_factory=ModelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    redis: RedisConfig = field(default_factory=RedisConfig)
    log: LogConfig = field(default_factory=LogConfig)
    served_model_name: list[str] = field(default_factory=list)


@dataclass
class ServeConfig:
    """The configuration of `headrace serve`."""

    model: ModelConfig = field(default_factory=ModelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    redis: RedisConfig = field(default_factory=RedisConfig)
    api: ApiConfig = field(default_factory=ApiConfig)
    log: LogConfig = field(default_factory=LogConfig)
