"""Makes docs/configuration.md from the configuration tree; a test keeps the file current."""

from __future__ import annotations

from ops.options import TITLES
from ops.settings import SETTINGS, Setting

HEAD = """\
# Configuration

`headrace config-docs` makes this page from the configuration tree.

Every setting can be given in four places. A later place wins over the ones before it:

1. its default;
2. a YAML file, `--config FILE` or `HEADRACE_CONFIG`, with a line `name: value` for each setting, in kebab case or snake case;
3. the environment: `HEADRACE_` and the name in capitals; lists are separated by commas, or are a JSON array;
4. the command line.

```yaml
# headrace.yaml
model: /models/my-model
max-model-len: 8k
kv-cache-memory-bytes: 2G
served-model-name: [my-model, my-model-latest]
```

headrace refuses unknown names and suggests the nearest known one. Numbers may end in `k`, `m`, `g`, `t` (powers of 1000) or
`K`, `M`, `G`, `T` (powers of 1024). Names and meanings are vLLM's where vLLM has the option. At its start `headrace serve` logs the
source of each setting. As text it leaves out settings with default values. When the engines are ready it logs the values that they
chose, and why.

Kubernetes sets variables such as `HEADRACE_SERVICE_HOST` and `HEADRACE_PORT=tcp://10.96.4.7:8000` for a service named `headrace`.
headrace ignores them with a warning. `enableServiceLinks: false` in the pod keeps them out.
"""


def configuration_markdown() -> str:
    """The whole page, ending in a newline."""
    parts = [HEAD]
    for section, title in TITLES.items():
        rows = [_row(setting) for setting in SETTINGS.values() if setting.section == section]
        parts.append(f"\n## {title}\n\n| flag | default | meaning |\n| --- | --- | --- |\n" + "".join(rows))
    return "".join(parts)


def _row(setting: Setting) -> str:
    flag = f"`{setting.flag}`"
    if setting.type is bool:
        flag += f", `--no-{setting.flag[2:]}`"
    if setting.positional:
        flag += ", or the argument"
    meaning = setting.help.replace("|", "\\|")
    if setting.choices:
        meaning += " (" + ", ".join(f"`{choice}`" for choice in setting.choices) + ")"
    return f"| {flag} | {_default(setting)} | {meaning} |\n"


def _default(setting: Setting) -> str:
    if setting.type is bool:
        return "on" if setting.default else "off"
    return "" if setting.default in (None, "", []) else f"`{setting.default}`"
