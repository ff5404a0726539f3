"""Service tiers (https://platform.openai.com/docs/guides/priority-processing): what a request asks for, and what it gets."""

from __future__ import annotations

from msgspec.structs import replace

from api.preparation.task import Task
from engine.config import ApiConfig

PRIORITY, FLEX, DEFAULT = "priority", "flex", "default"


def used_tier(asked: str, tenant: str, config: ApiConfig) -> str:
    """The tier that a request of `tenant` runs in. Keys may have `priority` only by the server's settings: it goes before all other
    tenants' requests, whatever their shares."""
    if asked == FLEX or (asked == PRIORITY and (not config.asks_for_keys or tenant in config.priority_tenant)):
        return asked
    return DEFAULT


def in_tier(task: Task, tier: str) -> Task:
    """The task whose answer says that it ran in `tier`."""
    return replace(task, tier="" if tier == DEFAULT else tier, answer=replace(task.answer, service_tier=tier))
