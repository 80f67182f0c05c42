"""What TensorBoard needs beside the scalars: the run's hyperparameters and a layout."""

from __future__ import annotations

from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar import layout_pb2
from tensorboard.plugins.hparams import plugin_data_pb2

from tests.pretrain.telemetry.records import make_record, open_telemetry


def test_hparams_and_layout_belong_to_the_run_itself(tmp_path: Path) -> None:
    telemetry = open_telemetry(tmp_path)
    telemetry.log(make_record(1, validated=True))
    telemetry.close({"perplexity/valid": 13.0, "loss/train": 5.0})
    telemetry.close()  # a second close is harmless
    assert [path for path in (tmp_path / "tensorboard").iterdir() if path.is_dir()] == []
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    contents = events.PluginTagToContent("hparams")
    start = plugin_data_pb2.HParamsPluginData.FromString(contents["_hparams_/session_start_info"])
    values = start.session_start_info.hparams
    assert values["attention.variant"].string_value == "orthogonal"
    assert values["optimizer.learning_rate"].number_value == 1e-3
    assert values["model.tied"].string_value == "true"
    experiment = plugin_data_pb2.HParamsPluginData.FromString(
        contents["_hparams_/experiment"]
    ).experiment
    assert {info.name.tag for info in experiment.metric_infos} == {"perplexity/valid", "loss/train"}
    shown_first = {info.name for info in experiment.hparam_infos if info.differs}
    assert shown_first == {"attention.variant", "optimizer.learning_rate", "result.perplexity"}
    assert "_hparams_/session_end_info" in contents
    (layout_event,) = events.Tensors("custom_scalars__config__")
    layout = layout_pb2.Layout.FromString(layout_event.tensor_proto.string_val[0])
    titles = [category.title for category in layout.category]
    assert titles == ["quality", "throughput", "memory", "stability, attention and weights"]
    assert len(layout.category[0].chart) < 8  # the next groups are within reach
    charts = {chart.title for category in layout.category for chart in category.chart}
    assert {"training loss", "validation loss", "gradient norm", "tokens per second"} <= charts
