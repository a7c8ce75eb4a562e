"""Traces of PyTorch's profiler: every moment of a step has one term, and kernels their class."""

import gzip
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import planner
from planner.errors import RequestError
from planner.plan.binding.machine import machine_of
from planner.plan.compare.classes import class_times, predicted_classes
from planner.plan.compare.kernel_names import class_of_kernel, class_of_operator, collective_of
from planner.plan.compare.kineto import TRACE_TERMS, read_trace
from planner.plan.compare.traced import compare_trace, predicted_trace_terms
from tests.refusals import refused
from tests.unit.plan.test_measured import plan

GEMM, FLASH = "sm90_xmma_gemm_bf16bf16_bf16f32", "void flash::flash_fwd_kernel<cutlass::bfloat16_t>"
ALL_REDUCE, SEND = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL", "ncclDevKernel_SendRecv"
ADAM = "void at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor>"


def event(name: str, start: float, long: float, cat: str = "kernel", device: int = 0, **args: str) -> dict[str, Any]:
    """An event, in microseconds."""
    return {"ph": "X", "cat": cat, "name": name, "pid": device, "tid": 7, "ts": start, "dur": long,
            "args": {"device": device, **args}}  # fmt: skip


def written(folder: Path, events: list[Any], name: str = "trace.json") -> Path:
    path, text = folder / name, json.dumps({"traceEvents": events})
    path.write_bytes(gzip.compress(text.encode()) if name.endswith("gz") else text.encode())
    return path


STEP = [
    event("ProfilerStep#5", 0, 1000, "user_annotation"),
    event(GEMM, 100, 300),
    event(FLASH, 400, 100),
    event(ALL_REDUCE, 350, 250),  # 150 of it under kernels
    event(SEND, 550, 150),  # 50 of it under the all-reduce
    event(ADAM, 800, 100),
    event("aten::mm", 0, 5, "cpu_op"),
    {"ph": "M", "name": "process_name"},
]


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_every_moment_has_one_term(tmp_path: Path, name: str) -> None:
    found = read_trace(written(tmp_path, STEP, name))
    assert found.step_seconds == pytest.approx(1e-3)
    assert found.steps == 1
    wanted = {"computation": 4e-4, "update": 1e-4, "communication": 1e-4, "transfer": 1e-4, "rest": 3e-4}
    assert dict(found.terms) == pytest.approx(wanted)
    assert sum(found.terms.values()) == pytest.approx(found.step_seconds)
    assert [(one.name, one.calls) for one in found.kernels] == [("matmul", 1), ("attention", 1), ("optimizer", 1)]
    reduced = found.collectives[0]
    assert (reduced.name, reduced.seconds, reduced.exposed) == (
        "all_reduce",
        pytest.approx(2.5e-4),
        pytest.approx(1e-4),
    )


def test_several_steps_are_a_mean_and_the_busiest_device_counts(tmp_path: Path) -> None:
    later = [{**one, "ts": one["ts"] + 1000, "name": one["name"].replace("#5", "#6")} for one in STEP if "ts" in one]
    other = event(GEMM, 100, 10, device=1)
    once, twice = (read_trace(written(tmp_path, events)) for events in (STEP, [*STEP, *later, other]))
    assert twice.steps == 2
    assert dict(twice.terms) == pytest.approx(dict(once.terms))


def test_a_step_that_is_marked_on_every_stream_is_one_step(tmp_path: Path) -> None:
    """Kineto writes a mark of the device for each stream with kernels of the step: the collectives' stream has its
    own, which begins and ends elsewhere."""
    marks = [
        event(f"ProfilerStep#{at}", 1000 * at + start, long, "gpu_user_annotation") | {"tid": stream}
        for at in (5, 6)
        for stream, start, long in ((7, 0, 1000), (20, 350, 350))
    ]
    kernels = [event(name, 1000 * at + 100, 500) for at in (5, 6) for name in (GEMM, ALL_REDUCE)]
    found = read_trace(written(tmp_path, [*marks, *kernels]))
    assert (found.steps, found.step_seconds) == (2, pytest.approx(1e-3))


def test_a_trace_of_another_number_of_devices_is_refused(tmp_path: Path) -> None:
    """The profiler notes how many ranks a run had, as `distributedInfo` beside the events."""
    path = tmp_path / "trace.json"
    for ranks in (4, 8):
        noted = {"distributedInfo": {"backend": "nccl", "rank": 0, "world_size": ranks}, "traceEvents": STEP}
        path.write_text(json.dumps(noted), encoding="utf-8")
        assert read_trace(path).ranks == ranks
    assert compare_trace(plan(), replace(read_trace(path), ranks=4)).measured_seconds == pytest.approx(1e-3)
    with refused(RequestError, 8, 4, "devices"):
        compare_trace(plan(), read_trace(path))


def test_a_trace_without_marks_is_one_step(tmp_path: Path) -> None:
    found = read_trace(written(tmp_path, STEP[1:]))
    assert found.step_seconds == pytest.approx(8e-4)


def test_on_a_cpu_operators_run_without_those_that_they_call(tmp_path: Path) -> None:
    """A trace that PyTorch itself has written."""
    left = torch.randn(64, 64)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        torch.nn.functional.softmax(left @ left, dim=0).sum()
    path = tmp_path / "cpu.json"
    profiler.export_chrome_trace(str(path))
    found = read_trace(path)
    kernels = {one.name: one.seconds for one in found.kernels}
    assert kernels["matmul"] > 0
    assert sum(kernels.values()) == pytest.approx(found.terms["computation"], rel=0.01)
    assert found.terms["communication"] == 0


def test_what_is_no_trace_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_text('{"traceEvents": 3}', encoding="utf-8")
    with refused(RequestError, "traceEvents", "export_chrome_trace"):
        read_trace(path)
    with refused(RequestError, "no kernels and no operators"):
        read_trace(written(tmp_path, [event("cudaLaunchKernel", 0, 5, "cuda_runtime")]))
    path.write_bytes(gzip.compress(b"{}")[:-4])
    with refused(RequestError, "gzip"):
        read_trace(path)


def test_terms_sum_to_the_step_on_both_sides(tmp_path: Path) -> None:
    said = predicted_trace_terms(plan().prediction)
    assert tuple(said) == TRACE_TERMS
    assert sum(said.values()) == pytest.approx(plan().prediction.step_seconds)
    found = compare_trace(plan(), read_trace(written(tmp_path, STEP)))
    assert sum(one.share for one in found.terms) == pytest.approx(found.error)
    assert found.measured_peak_bytes is None


@pytest.mark.parametrize(
    ("name", "op_class"),
    [
        (GEMM, "matmul"),
        ("nvjet_tst_128x256_64x4_2x1_v_bz_TNT", "matmul"),
        (FLASH, "attention"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma", "attention"),
        ("void at::native::vectorized_elementwise_kernel<4, CUDAFunctor_add>", "elementwise"),
        ("void transformer_engine::normalization::rmsnorm_fwd_tuned_kernel", "normalisation"),
        ("Memcpy DtoD (Device -> Device)", "copy"),
        (ADAM, "optimizer"),
        ("triton_poi_fused_mul_silu_0", "elementwise"),
        ("void (anonymous namespace)::softmax_warp_forward", "cross_entropy"),
        ("_chunk_scan_fwd_kernel", "state_space"),
        ("_bmm_chunk_bwd_kernel", "state_space"),
        ("void selective_scan_fwd_kernel<Selective_Scan_fwd_kernel_traits<128, 16>>", "selective_scan"),
        ("void causal_conv1d_channellast_fwd_kernel", "elementwise"),
        ("void multi_tensor_apply_kernel<TensorListMetadata<1>, L2NormFunctor<float>, float*>", "optimizer"),
        ("void multi_tensor_apply_kernel<TensorListMetadata<1>, LpNormFunctor<float, (NormType)1>>", "optimizer"),
        ("void cudnn::cnn::wgrad_alg0_engine<float, 512, 6, 5, 3, 3, 3, false, 512>", "matmul"),
        ("void cudnn::winograd_nonfused::winogradForwardOutput4x4<float, float>", "matmul"),
        ("void LSTM_elementWise_fp<float, float, float>", "recurrent"),
    ],
)
def test_kernels_have_the_class_of_their_name(name: str, op_class: str) -> None:
    assert collective_of(name) is None
    assert class_of_kernel(name) == op_class


@pytest.mark.parametrize(
    ("name", "said", "kind"),
    [
        (ALL_REDUCE, "", "all_reduce"),
        ("ncclDevKernel_ReduceScatter_Sum_f32", "", "reduce_scatter"),
        (SEND, "all_to_allv", "all_to_all"),
        (SEND, "", "send_recv"),
        ("void deep_ep::intranode::dispatch<8, 768>", "", "all_to_all"),
        ("gloo:all_gather", "", "all_gather"),
        ("ncclKernel_Strange", "", "other"),
    ],
)
def test_collectives_have_the_kind_of_their_name(name: str, said: str, kind: str) -> None:
    assert collective_of(name, said) == kind


def test_classes_of_both_sides_stand_together() -> None:
    found = class_times({"matmul": 2.0, "copy": 0.5}, {"matmul": 1.0, "attention": 3.0}, {"matmul": 7.0})
    assert [(one.name, one.predicted, one.measured, one.calls) for one in found] == [
        ("attention", None, 3.0, None),
        ("matmul", 2.0, 1.0, 7.0),
        ("copy", 0.5, None, None),
    ]
    assert class_of_operator("_fused_adam_") == "optimizer"


def test_records_have_the_mean_of_all_ranks_and_so_have_predictions_beside_them() -> None:
    """The last rank of a pipeline has the loss, the first one the embedding; a record has half of each."""
    decided = {"pipeline": 2, "virtual_stages": 1, "schedule": "1f1b", "micro_batches": 2}
    found = planner.search("llama-tiny", "cpu", devices=2, global_batch=4, pinned=decided)
    machine = machine_of(found.plan.cluster)
    longest, mean = (predicted_classes(found.bound, machine, mean=mean) for mean in (False, True))
    assert ("embedding" in longest) != ("cross_entropy" in longest)
    assert {"embedding", "cross_entropy"} <= mean.keys()
    assert sum(mean.values()) < sum(longest.values())


@pytest.mark.parametrize(
    ("name", "op_class"),
    [
        *(("convolution", "matmul"), ("mkldnn_convolution", "matmul"), ("convolution_backward", "matmul")),
        *(("_softmax", "normalisation"), ("_softmax_backward_data", "normalisation")),
        ("_log_softmax", "cross_entropy"),
        *(("index", "copy"), ("gather", "copy"), ("index_select", "embedding"), ("_index_put_impl_", "embedding")),
        *(("addmm_", "matmul"), ("max_pool2d_with_indices", "elementwise"), ("commented", "elementwise")),
    ],
)
def test_operators_have_the_class_by_which_they_are_predicted(name: str, op_class: str) -> None:
    assert class_of_operator(name) == op_class
