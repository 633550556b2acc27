"""FLOPs, bytes and collectives that are read from the text of a compiled program."""

from __future__ import annotations

import pytest

from lazytpu.debug import hlo
from lazytpu.debug.chips import chip_of
from lazytpu.debug.collectives import Collective, axis_of, collectives_of, groups_of
from lazytpu.debug.hlo_costs import Product, kernels, memory_bytes, products
from lazytpu.debug.hlo_types import arrays_of
from lazytpu.debug.roofline import link_seconds, links_of, roofline
from lazytpu.ir.sharding import Mesh
from lazytpu.runtime.ahead import too_large

MESH = Mesh((2, 4), ("data", "model"), tuple(range(8)))
V5E = chip_of("TPU v5 lite")
assert V5E is not None

LOOP = """HloModule step

%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %sum = f32[] add(%x, %y)
}

%all-reduce-scatter.1 (input: f32[64,32]) -> f32[16,32] {
  %input = f32[64,32]{1,0:T(8,128)S(1)} parameter(0)
  %all-reduce.7 = f32[64,32]{1,0:T(8,128)} all-reduce(%input), channel_id=3, replica_groups=[2,4]<=[8], to_apply=%add
  %id = u32[] partition-id()
  %zero = u32[] constant(0)
  ROOT %slice = f32[16,32]{1,0} dynamic-slice(%all-reduce.7, %id, %zero), dynamic_slice_sizes={16,32}
}

%body (state: (s32[], f32[64,32])) -> (s32[], f32[64,32]) {
  %state = (s32[], f32[64,32]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %h = f32[64,32]{1,0} get-tuple-element(%state), index=1
  %all-gather.5 = f32[32,32]{1,0:T(8,128)S(1)} all-gather(%part), channel_id=1, dimensions={0}, \
replica_groups=mesh['a'=2,'b'=4] {'b'}, use_global_device_ids=true
  %all-gather.6 = f32[32,32]{1,0:T(8,128)} all-gather(%part), channel_id=1, dimensions={0}, \
replica_groups=mesh['a'=2,'b'=4] {'b'}, use_global_device_ids=true
  %part = f32[8,32]{1,0} constant(0)
  %dot.1 = f32[64,32]{1,0} dot(%h, %all-gather.5), lhs_contracting_dims={1}, rhs_contracting_dims={0}, \
operand_precision={highest,highest}
  ROOT %result = (s32[], f32[64,32]{1,0}) tuple(%i, %dot.1)
}

%condition (state: (s32[], f32[64,32])) -> pred[] {
  %state = (s32[], f32[64,32]{1,0}) parameter(0)
  ROOT %more = pred[] constant(true)
}

ENTRY %main (p: f32[64,32]) -> f32[16,32] {
  %p = f32[64,32]{1,0} parameter(0)
  %zero = s32[] constant(0)
  %start = (s32[], f32[64,32]{1,0}) tuple(%zero, %p)
  %while = (s32[], f32[64,32]{1,0}) while(%start), condition=%condition, body=%body, \
backend_config={"known_trip_count":{"n":"12"}}
  %h = f32[64,32]{1,0} get-tuple-element(%while), index=1
  ROOT %fusion = f32[16,32]{1,0} fusion(%h), kind=kCustom, calls=%all-reduce-scatter.1
}
"""


@pytest.mark.parametrize(("direction", "runs"), [("LT", 12), ("GT", 1)])
def test_a_loop_runs_to_the_end_of_its_counter(direction: str, runs: int) -> None:
    counter = f"""  %i = s32[] get-tuple-element(%state), index=0
  %end = s32[] constant(12)
  ROOT %more = pred[] compare(%i, %end), direction={direction}"""
    text = LOOP.replace("known_trip_count", "unknown").replace("  ROOT %more = pred[] constant(true)", counter)
    assert hlo.parse(text).runs["body"] == runs


def test_what_a_loop_does_counts_in_each_iteration() -> None:
    module = hlo.parse(LOOP)
    assert module.runs["body"] == 12 and module.runs["main"] == 1
    (found,) = products(module)
    assert (found.flops, found.runs) == (2 * 64 * 32 * 32, 12)
    assert (found.dtype, found.precision) == ("f32", "highest")
    # in each iteration: two gathers of 8x32 (one of them into memory), h and the result; the fusion behind it
    assert memory_bytes(module) == 12 * 4 * (2 * 8 * 32 + 32 * 32 + 2 * 64 * 32) + 4 * (64 * 32 + 16 * 32)


def test_a_pallas_kernel_reads_its_operands_and_writes_its_results_once() -> None:
    kernel = '%k = f32[64,32]{1,0} custom-call(%h, %w), custom_call_target="tpu_custom_call"'
    other = kernel.replace("%k", "%o").replace("tpu_custom_call", "Sharding")
    begin, end = LOOP.split("ENTRY", 1)
    with_both = begin + "ENTRY" + end.replace("  ROOT %fusion", f"  {kernel}\n  {other}\n  ROOT %fusion")
    module, before = hlo.parse(with_both), hlo.parse(LOOP)
    assert (kernels(before), kernels(module)) == (0, 1)
    assert memory_bytes(module) - memory_bytes(before) == 4 * 2 * 64 * 32  # there is no %w


def test_collectives_have_kind_bytes_and_axis() -> None:
    scatter, gather = collectives_of(hlo.parse(LOOP), MESH)
    assert (scatter.kind, scatter.axis, scatter.group, scatter.total_bytes) == ("reduce-scatter", "model", 4, 8192)
    assert (gather.kind, gather.axis, gather.runs, gather.nbytes) == ("all-gather", "model", 12, 4096)  # once a channel


@pytest.mark.parametrize(
    ("attributes", "axis"),
    [
        ("replica_groups={{0,1,2,3},{4,5,6,7}}, to_apply=%add", "model"),
        ("replica_groups={{0,4},{1,5},{2,6},{3,7}}", "data"),
        ("replica_groups=[4,2]<=[2,4]T(1,0)", "data"),
        ("replica_groups=[1,8]<=[8]", "data+model"),
        ("replica_groups={}", "data+model"),
        ("replica_groups=mesh['x'=2,'y'=2,'z'=2] {'y','z'}", "model"),
        ("replica_groups=[4,2]<=[8]", "model"),  # pairs inside the axis
        ("source_target_pairs={{0,1},{1,2},{2,3},{3,0},{4,5},{5,6},{6,7},{7,4}}", "model"),
        ("replica_groups={{0,5},{1,4},{2,7},{3,6}}", "data+model"),
    ],
)
def test_axis_of_groups(attributes: str, axis: str) -> None:
    assert axis_of(groups_of(attributes, 8), MESH) == axis


def test_types() -> None:
    first, second, third = arrays_of("(bf16[4,8]{1,0:T(8,128)(2,1)S(1)}, s4[16]{0}, pred[])")
    assert (first.nbytes, first.space) == (64, 1)
    assert (second.nbytes, third.nbytes, third.shape) == (8, 1, ())


def test_convolutions_count_what_meets_an_element() -> None:
    text = """ENTRY %main (x: f32[2,8,8,3], w: f32[3,3,3,4]) -> f32[2,8,8,4] {
  %x = f32[2,8,8,3]{3,2,1,0} parameter(0)
  %w = f32[3,3,3,4]{3,2,1,0} parameter(1)
  ROOT %c = f32[2,8,8,4]{3,2,1,0} convolution(%x, %w), window={size=3x3 pad=1_1x1_1}, dim_labels=b01f_01io->b01f
}
"""
    inside = (8 * 3 - 2) ** 2  # of each side, of 8 results with 3 taps, two taps lie outside
    assert [p.flops for p in products(hlo.parse(text))] == [2 * 2 * 4 * 3 * inside]
    batched = """ENTRY %main (x: f32[4,128,64], w: f32[4,128,64]) -> f32[4,128,128] {
  %x = f32[4,128,64]{2,1,0} parameter(0)
  %w = f32[4,128,64]{2,1,0} parameter(1)
  ROOT %c = f32[4,128,128]{2,1,0} convolution(%x, %w), window={size=4 stride=3 lhs_dilate=4}, dim_labels=0bf_0oi->0bf
}
"""
    assert [p.flops for p in products(hlo.parse(batched))] == [2 * 4 * 128 * 128 * 64]  # a product for each of four


@pytest.mark.parametrize(
    ("target", "left", "right", "result"),
    [
        ("convForward", "2,8,8,3", "4,3,3,3", "2,8,8,4"),
        ("convBackwardFilter", "2,8,8,3", "2,8,8,4", "4,3,3,3"),
        ("convBackwardInput", "2,8,8,4", "4,3,3,3", "2,8,8,3"),
    ],
)
def test_convolutions_of_a_library_count_as_the_one_they_are_of(
    target: str, left: str, right: str, result: str
) -> None:
    text = f"""ENTRY %main (x: f32[{left}], w: f32[{right}]) -> (f32[{result}], u8[64]) {{
  %x = f32[{left}] parameter(0)
  %w = f32[{right}] parameter(1)
  ROOT %c = (f32[{result}], u8[64]) custom-call(%x, %w), window={{size=3x3 pad=1_1x1_1}}, \
dim_labels=b01f_o01i->b01f, operand_precision={{highest,highest}}, custom_call_target="__cudnn${target}"
}}
"""
    (found,) = products(hlo.parse(text))
    assert (found.flops, found.precision) == (2 * 2 * 4 * 3 * (8 * 3 - 2) ** 2, "highest")
    assert memory_bytes(hlo.parse(text)) == 4 * (2 * 8 * 8 * (3 + 4) + 4 * 3 * 3 * 3)


def test_products_of_a_library_count() -> None:
    text = """ENTRY %main (x: c64[8,16,4]) -> (c64[8,16,16], s8[4096]) {
  %x = c64[8,16,4] parameter(0)
  ROOT %c = (c64[8,16,16], s8[4096]) custom-call(%x, %x), custom_call_target="__cublas$lt$matmul", backend_config=\
{"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["2"],"rhs_contracting_dimensions":["2"],\
"lhs_batch_dimensions":["0"]},"precision_config":{"operand_precision":["HIGHEST","HIGHEST"]}}}
}
"""
    (found,) = products(hlo.parse(text))
    assert (found.flops, found.dtype, found.precision) == (2 * 8 * 16 * 16 * 4, "c64", "highest")


def test_least_time() -> None:
    one = Collective("all-gather", 8_000_000, "model", 4, runs=10)
    product = Product(197_000_000, "bf16", "default", 1000, 1)
    line = roofline([product], 819e6, [one], V5E, {"model": 2})
    assert (line.compute_s, line.memory_s) == pytest.approx((1e-3, 1e-3))
    assert line.links_s == pytest.approx(80e6 * 3 / 4 / 100e9)
    assert line.least_s == pytest.approx(1e-3) and line.apart_s == pytest.approx(2.6e-3)
    exact = roofline([Product(197_000_000, "f32", "highest", 1000, 1)], 0, [], V5E, {})
    assert exact.compute_s == pytest.approx(6e-3) and exact.bound == "compute"
    reduced = Collective("all-reduce", 8_000_000, "model", 4, runs=10)
    assert link_seconds(reduced, V5E, {"model": 2}) == pytest.approx(2 * line.links_s)
    assert link_seconds(Collective("all-reduce", 8, "model", 1), V5E, {}) == 0


def test_links_of_a_ring() -> None:
    row = [(i, 0, 0) for i in range(16)]
    assert links_of(row, (16, 16, 1), V5E) == 2
    assert links_of(row[:4], (4, 4, 1), V5E) == 1  # no ring: the side does not close
    assert links_of([(i, j, 0) for i in range(16) for j in range(16)], (16, 16, 1), V5E) == 4


def test_what_is_too_large() -> None:
    used = too_large("RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 20.5G of 15.75G hbm.", 2**30)
    assert used is not None
    assert (used.needed, used.limit, used.temporaries) == (20.5 * 2**30, 15.75 * 2**30, 19.5 * 2**30)
    text = "the total memory required for HLO temporaries (64.00G) exceeds available HBM (15.75G)."
    found = too_large(text, 2**30)
    assert found is not None and found.needed == 65 * 2**30
    assert too_large("INTERNAL: something else", 0) is None
