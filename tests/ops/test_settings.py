"""The configuration tree: four sources in order, values with suffixes, mistakes that are told, secrets that are not."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from engine.config import ServeConfig
from ops.announce import show_configuration
from ops.errors import SettingError
from ops.prepare import tell_of_no_effect
from ops.reference import configuration_markdown
from ops.settings import SETTINGS, describe, parse, resolve, role_environment, shown

REPOSITORY = Path(__file__).parents[2]


def write(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


def test_later_sources_win_and_are_named(tmp_path: Path) -> None:
    file = write(tmp_path / "h.yaml", "max-model-len: 1k\nblock_size: 32\nport: 1\n")
    environ = {"HEADRACE_BLOCK_SIZE": "64", "HEADRACE_PORT": "2", "HOME": "/root"}
    resolved = resolve({"port": 3}, environ, file)
    assert resolved.config.model.max_model_len == 1000
    assert resolved.config.cache.block_size == 64
    assert resolved.config.api.port == 3
    assert resolved.sources["max_model_len"] == f"file {file}"
    assert resolved.sources["block_size"] == "environment HEADRACE_BLOCK_SIZE"
    assert resolved.sources["port"] == "command line --port"
    assert resolved.sources["host"] == "default"


def test_the_environment_can_name_the_file(tmp_path: Path) -> None:
    file = write(tmp_path / "h.yaml", "seed: 7\n")
    assert resolve({}, {"HEADRACE_CONFIG": file}).config.model.seed == 7


def test_no_two_settings_share_a_name() -> None:
    fields = [field.name for section in dataclasses.fields(ServeConfig) for field in dataclasses.fields(section.default_factory)]  # type: ignore[arg-type]
    assert len(fields) == len(set(fields)) == len(SETTINGS)


@pytest.mark.parametrize(
    ("name", "raw", "value"),
    [
        ("max_model_len", "2048", 2048),
        ("max_model_len", "1k", 1000),
        ("max_model_len", "2K", 2048),
        ("max_model_len", "25.6k", 25600),
        ("max_model_len", "-1", -1),
        ("max_model_len", 4096, 4096),
        ("kv_cache_memory_bytes", "2G", 2 << 30),
        ("kv_cache_memory_bytes", "512MiB", 512 << 20),
        ("kv_cache_memory_bytes", "1g", 10**9),
        ("watermark", "0.5", 0.5),
        ("watermark", 1, 1.0),
        ("enable_prefix_caching", "no", False),
        ("enable_prefix_caching", True, True),
        ("dtype", "bfloat16", "bfloat16"),
        ("served_model_name", ["a", "b"], ["a", "b"]),
        ("served_model_name", "a", ["a"]),
    ],
)
def test_values_are_parsed_to_their_types(name: str, raw: Any, value: Any) -> None:
    parsed = parse(SETTINGS[name], raw, "here")
    assert parsed == value and type(parsed) is type(value)


@pytest.mark.parametrize(
    ("name", "raw", "complaint"),
    [
        ("port", "http", "`http` is not a whole number"),
        ("port", 1.5, "not a whole number"),
        ("port", True, "not a whole number"),
        ("port", "2.5K", "not a whole number"),
        ("watermark", "nan", "not a number"),
        ("watermark", "half", "not a number"),
        ("enable_prefix_caching", "perhaps", "neither true nor false"),
        ("dtype", "float64", "`float64` is not one of auto, float32, bfloat16"),
        ("host", {"a": 1}, "one value is expected"),
    ],
)
def test_bad_values_are_refused(name: str, raw: Any, complaint: str) -> None:
    with pytest.raises(SettingError, match="here: ") as refusal:
        parse(SETTINGS[name], raw, "here")
    assert complaint in str(refusal.value)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("max-modellen: 5", "unknown setting `max-modellen`; did you mean `max_model_len`?"),
        ("port: 1\nPORT: 2", "unknown setting `PORT`"),
        ("max-model-len: 1\nmax_model_len: 2", "given twice"),
        ("- port", "must hold settings"),
        ("port: [", "not valid YAML"),
        ("port: high", "port: `high` is not a whole number"),
    ],
)
def test_mistakes_in_the_file_are_told(tmp_path: Path, text: str, complaint: str) -> None:
    file = write(tmp_path / "h.yaml", text)
    with pytest.raises(SettingError) as refusal:
        resolve({}, {}, file)
    assert complaint in str(refusal.value) and file in str(refusal.value)


def test_a_missing_file_is_told() -> None:
    with pytest.raises(SettingError, match=r"nowhere\.yaml: No such file"):
        resolve({}, {}, "nowhere.yaml")


def test_unknown_variables_are_refused_with_the_nearest_name() -> None:
    with pytest.raises(SettingError, match="HEADRACE_PROT; did you mean `HEADRACE_PORT`"):
        resolve({}, {"HEADRACE_PROT": "1"})


KUBERNETES = {
    "HEADRACE_SERVICE_HOST": "10.96.4.7",
    "HEADRACE_SERVICE_PORT": "8000",
    "HEADRACE_SERVICE_PORT_HTTP": "8000",
    "HEADRACE_PORT": "tcp://10.96.4.7:8000",
    "HEADRACE_PORT_8000_TCP": "tcp://10.96.4.7:8000",
    "HEADRACE_PORT_8000_TCP_PROTO": "tcp",
    "HEADRACE_PORT_8000_TCP_PORT": "8000",
    "HEADRACE_PORT_8000_TCP_ADDR": "10.96.4.7",
    "HEADRACE_API_SERVICE_HOST": "fd00::7",
    "HEADRACE_API_SERVICE_PORT": "8000",
    "HEADRACE_API_PORT": "udp://[fd00::7]:8000",
    "HEADRACE_API_PORT_8000_UDP_ADDR": "fd00::7",
    "HEADRACE_CONFIG_PORT": "tcp://10.96.4.8:80",
    "HEADRACE_CONFIG_SERVICE_HOST": "10.96.4.8",
}


def test_variables_that_kubernetes_sets_for_services_are_ignored() -> None:
    resolved = resolve({}, {**KUBERNETES, "HEADRACE_SEED": "9"})
    assert resolved.config.model.seed == 9 and resolved.config.api.port == 8000
    assert resolved.ignored == sorted(KUBERNETES)
    assert not KUBERNETES.keys() & role_environment(resolved.config, ("model", "api"), {**KUBERNETES, "PATH": "/bin"}).keys()


@pytest.mark.parametrize(
    ("variable", "value"), [("HEADRACE_PORT", "http://10.96.4.7:8000"), ("HEADRACE_PORT", "tcp"), ("HEADRACE_SERVICE", "x")]
)
def test_variables_unlike_those_of_kubernetes_are_still_mistakes(variable: str, value: str) -> None:
    with pytest.raises(SettingError):
        resolve({}, {variable: value})


def test_no_setting_has_a_name_that_kubernetes_sets() -> None:
    assert resolve({}, {setting.variable: "" for setting in SETTINGS.values()}).ignored == []


def test_lists_in_the_environment_are_split_at_commas_or_read_as_json() -> None:
    assert resolve({}, {"HEADRACE_SERVED_MODEL_NAME": "a, b"}).config.api.served_model_name == ["a", "b"]
    assert resolve({}, {"HEADRACE_API_KEY": '["x=1,2", "y=3"]'}).config.api.api_key == ["x=1,2", "y=3"]


def test_empty_variables_count_as_absent() -> None:
    assert resolve({}, {"HEADRACE_PORT": ""}).config.api.port == 8000


def test_a_role_finds_in_its_environment_what_was_resolved() -> None:
    """What the supervisor hands on through the environment resolves to the same tree, section by section."""
    given = {"max_model_len": -1, "enable_prefix_caching": False, "api_key": ["a=k,1"], "watermark": 0.25, "port": 0}
    config = resolve(given, {}).config
    everything = role_environment(
        config, [field.name for field in dataclasses.fields(config)], {"HEADRACE_SEED": "9", "PATH": "/bin"}
    )
    assert everything["PATH"] == "/bin" and "HEADRACE_SEED" not in everything
    assert resolve({}, everything).config == config
    assert not any("KEY" in name for name in role_environment(config, ("model", "cache"), {}))


def test_secrets_are_not_shown() -> None:
    resolved = resolve({"api_key": ["alice=hunter2", "root:admin=s3cret", "bare"], "redis_url": "redis://u:pass@host:1/0"}, {})
    text = "\n".join(" ".join(map(str, row)) for row in describe(resolved))
    assert "alice=***, root:admin=***, ***" in text and "redis://u:***@host:1/0" in text
    assert not any(secret in text for secret in ("hunter2", "s3cret", "bare", "pass@"))
    assert shown("redis_url", "redis://host:1/0") == "redis://host:1/0"


@pytest.mark.parametrize("name", ["weights_cache_dir", "api_key", "redis_url", "chat_template", "max_num_queued_reqs", "seed"])
def test_a_setting_without_a_value_is_null_in_the_log_and_not_the_word_none(name: str, caplog: pytest.LogCaptureFixture) -> None:
    resolved = resolve({}, {})
    resolved.config.log.log_format = "json"
    caplog.set_level("INFO")
    show_configuration(resolved)
    logged = vars(caplog.records[-1])["config"]
    value = SETTINGS[name].default
    assert logged[name] == {"value": None if value in (None, "", []) else str(value), "source": "default"}
    assert "none" not in [each["value"] for each in logged.values()]


def test_an_unset_setting_and_the_value_none_differ_in_the_text(capsys: pytest.CaptureFixture[str]) -> None:
    resolved = resolve({}, {})
    resolved.config.log.log_format = "text"
    resolved.derive("weights_cache_dir", "none", "here")
    resolved.derive("data_dir", "", "there")
    show_configuration(resolved)
    lines = [line.split() for line in capsys.readouterr().err.splitlines()]
    assert [line[1:] for line in lines] == [["weights_cache_dir", "none", "(here)"], ["data_dir", "not", "set", "(there)"]]


def test_the_documentation_is_current() -> None:
    assert (REPOSITORY / "docs" / "configuration.md").read_text() == configuration_markdown(), "run `headrace config-docs`"


def test_options_without_effect_are_accepted_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    tell_of_no_effect(resolve({"trust_remote_code": True}, {"HEADRACE_ENABLE_CHUNKED_PREFILL": "false"}))
    assert [record.getMessage() for record in caplog.records] == [
        "--enable-chunked-prefill has no effect: prompts are always computed in chunks",
        "--trust-remote-code has no effect: code of a model's repository is never run",
    ]
    caplog.clear()
    tell_of_no_effect(resolve({}, {}))
    assert not caplog.records
