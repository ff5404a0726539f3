"""Prompts of known chat templates are cut at the assistant's turns."""

from __future__ import annotations

import pytest

from gpu.stand_in.conversation import Conversation

CHATML = (
    "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nOne?<|im_end|>\n<|im_start|>assistant\nA<|im_end|>\n"
    "<|im_start|>user\nTwo?<|im_end|>\n<|im_start|>assistant\n"
)
LLAMA3 = (
    "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|><|start_header_id|>user<|end_header_id|>\n\n"
    "One?<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\nA<|eom_id|><|start_header_id|>ipython<|end_header_id|>\n\n"
    "Two?<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
)
MISTRAL = '<s>Be brief.[INST] One?[/INST][TOOL_CALLS] [{"A": 1}]</s>[TOOL_RESULTS] Two?[/TOOL_RESULTS]'
GLM = "[gMASK]<sop><|system|>\nBe brief.<|user|>\nOne?<|assistant|>\nA<|observation|>\nTwo?<|assistant|>\n"
GEMMA = (
    "<bos><start_of_turn>user\nOne?<end_of_turn>\n<start_of_turn>model\nA<end_of_turn>\n"
    "<start_of_turn>user\nTwo?<end_of_turn>\n<start_of_turn>model\n"
)
HARMONY = (
    "<|start|>system<|message|>Be brief.<|end|><|start|>user<|message|>One?<|end|>"
    "<|start|>assistant<|channel|>analysis<|message|>A<|end|>"
    "<|start|>assistant<|channel|>commentary to=functions.f<|message|>A<|call|>"
    "<|start|>functions.f to=assistant<|message|>Two?<|end|><|start|>assistant"
)
DEEPSEEK = "Be brief.<|User|>One?<|Assistant|>A<|end\u2581of\u2581sentence|><|User|>Two?<|Assistant|>".replace("|", "\uff5c")
TEMPLATES = {"chatml": CHATML, "llama 3": LLAMA3, "mistral": MISTRAL, "glm": GLM, "gemma": GEMMA, "harmony": HARMONY}


@pytest.mark.parametrize("prompt", [*TEMPLATES.values(), DEEPSEEK], ids=[*TEMPLATES, "deepseek"])
def test_the_inputs_are_what_came_since_each_answer(prompt: str) -> None:
    conversation = Conversation.of(prompt)
    first, second = conversation.inputs
    assert "One?" in first and "Two?" in second
    assert "A" not in second.replace("Assistant", "") and "brief" not in first
    assert ("brief" in conversation.system) == ("brief" in prompt)
    assert not conversation.begun.strip()


def test_what_the_prompt_begins_of_the_answer() -> None:
    assert Conversation.of(f"{CHATML}<think>\n").begun == "\n<think>\n"
    assert Conversation.of("<|im_start|>user\nOne?<|im_end|>\n").begun == ""


def test_a_finished_turn_at_the_end_is_no_beginning() -> None:
    conversation = Conversation.of(f"{CHATML}B<|im_end|>\n<|im_start|>user\nThree?<|im_end|>\n")
    assert conversation.begun == "" and "Three?" in conversation.inputs[2] and "B" not in conversation.inputs[2]


def test_a_prompt_without_marks_is_one_input() -> None:
    assert Conversation.of("Once upon a time") == Conversation("", ["Once upon a time"], "")
