"""Samples in TensorBoard: read back by its own reader, and rendered as it renders them."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugin_util import markdown_to_safe_html

from pretrain.telemetry.event_file import markdown_of
from pretrain.telemetry.records import Sample
from tests.pretrain.telemetry.records import make_record, open_telemetry, read_strictly

HOSTILE = (
    "<script>alert(1)</script> <b>&amp; *stars* __lines__",
    "```\n# no heading\n```\n\n\n[a](http://x) ![b](http://y)",
    "def f():\r\treturn `1`\r\n\r- a\v1. b",
    "| a | b |\n|---|---|\n| 1 | 2 |",
    "</code></pre><h1>",
    "über ≠ 文 \U0001f600",
)


@pytest.mark.parametrize("text", HOSTILE)
def test_what_a_model_writes_stays_text(text: str) -> None:
    html = markdown_to_safe_html(markdown_of(Sample(text, text, 3, ended=False)))
    tags = re.findall(r"</?[a-z0-9]+>", html)
    heading, code = (
        ["<p>", "<strong>", "</strong>", "</p>"],
        ["<pre>", "<code>", "</code>", "</pre>"],
    )
    assert tags == [*heading, *code, *heading, *code]
    shown = re.findall(r"<code>(.*?)</code>", html, flags=re.DOTALL)
    entities = {"&lt;": "<", "&gt;": ">", "&amp;": "&"}
    plain = [re.sub(r"&(lt|gt|amp);", lambda match: entities[match[0]], block) for block in shown]
    assert [block.split() for block in plain] == [text.split()] * 2


def test_samples_stand_beside_the_scalars_of_their_step_and_survive_a_resume(
    tmp_path: Path,
) -> None:
    samples = (Sample("The", " cat sat", 3, ended=False), Sample("def f", "", 0, ended=True))
    telemetry = open_telemetry(tmp_path)
    for step in (1, 2, 3):
        at_step = (replace(samples[0], text=f" cat {step}"), samples[1]) if step > 1 else ()
        telemetry.log(replace(make_record(step, validated=step > 1), samples=at_step))
    telemetry.close()
    telemetry = open_telemetry(tmp_path, resume_step=2)  # step 3 is made again
    telemetry.log(replace(make_record(3, validated=True), samples=samples))
    telemetry.close()
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert sorted(events.PluginTagToContent("text")) == ["samples/0", "samples/1"]
    texts = {
        tag: {
            event.step: event.tensor_proto.string_val[0].decode() for event in events.Tensors(tag)
        }
        for tag in ("samples/0", "samples/1")
    }
    first = "**Prompt**\n\n    The\n\n**Continuation**, 3 tokens\n\n    "
    assert texts["samples/0"] == {2: f"{first} cat 2", 3: f"{first} cat sat"}
    assert texts["samples/1"][3].endswith(
        "**Continuation**, 0 tokens, then the end of the document\n\n"
    )
    assert not any(
        key.startswith("samples") and key != "samples" for key in read_strictly(tmp_path)[-1]
    )
