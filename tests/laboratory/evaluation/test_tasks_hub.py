"""evaluate tasks with the harness's own sst2, from the hub (here on loopback), then the cache."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.command_line import assert_refused
from tests.data_pipeline.sources.hub_server import serve
from tests.laboratory.evaluation.tiny_models import write_model
from tests.ranks import warm_cli

pytest.importorskip("lm_eval")
pytestmark = [pytest.mark.distributed, pytest.mark.slow]

CARD = """---
configs:
- config_name: sst2
  data_files:
  - split: train
    path: sst2/train-*
  - split: validation
    path: sst2/validation-*
---
"""


def glue_table(rows: int) -> bytes:
    """Parquet as nyu-mll/glue has it for sst2."""
    columns = {
        "sentence": pa.array([f"the {('cat', 'dog')[i % 2]} sees not" for i in range(rows)]),
        "label": pa.array([i % 2 for i in range(rows)], pa.int64()),
        "idx": pa.array(range(rows), pa.int32()),
    }
    file = io.BytesIO()
    pq.write_table(pa.table(columns), file)
    return file.getvalue()


def test_data_come_from_the_hub_and_then_from_the_cache(tmp_path: Path) -> None:
    models = [
        str(write_model(tmp_path / variant, variant, 1)) for variant in ("vanilla", "gaussian")
    ]
    files = {
        "README.md": CARD.encode(),
        "sst2/train-00000-of-00001.parquet": glue_table(8),
        "sst2/validation-00000-of-00001.parquet": glue_table(6),
    }
    environment = {
        "HF_HOME": str(tmp_path / "home"),
        "NO_PROXY": "127.0.0.1",
        "HF_HUB_OFFLINE": "0",
    }
    with serve(files, "nyu-mll/glue") as hub:
        environment["HF_ENDPOINT"] = hub.address
        command = ["evaluate", "tasks", *models, "--tasks", "sst2", "--out", str(tmp_path / "out")]
        done = warm_cli(command, environment=environment)
        assert any("sst2/validation" in request for request in hub.requests)
    assert done.returncode == 0, done.stderr
    assert "sst2" in done.stdout and "WARNING" not in done.stdout and "Traceback" not in done.stderr
    report = json.loads((tmp_path / "out/report.json").read_text())
    assert report["tasks"]["sst2"] == {"version": 1.0, "shots": 0, "items": 6}
    assert [comparison["gap"]["n"] for comparison in report["items"]] == [6]
    # The hub is gone. What was fetched is found again, what was not is refused.
    offline = environment | {"HF_HUB_OFFLINE": "1"}
    done = warm_cli([*command[:-1], str(tmp_path / "again")], environment=offline)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "again/report.json").read_text())["tasks"] == report["tasks"]
    command[command.index("sst2")] = "sst2,mrpc"
    done = warm_cli(command, environment=offline)
    assert_refused(
        done, "--tasks sst2,mrpc cannot be loaded", "without HF_HUB_OFFLINE", "--include-path"
    )
