"""Which of several equal values comes first where torch leaves it open: the order in which eager on the CPU gives them.

There an unstable ``sort`` is the C++ library's, which XLA calls too, ``topk`` its introselect or a heap, ``kthvalue`` a
quick select.  What becomes of equal values follows from the exchanges these make.  Those of one level of partitions are
known from counts of the elements on either side of the pivots, so they are made at once, for all rows.

Rows are arrays ``i64[r, n]`` of elements, which hold their rank in the upper and their place in the lower 32 bits.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import lax

from lazytpu.lowering.support.sort_keys import at_places, places_as_introsort, places_in_order

_BLOCK = 128  # elements that are looked through at once
_MOST_FOLLOWED = 1 << 16  # elements in which selections are followed, at about 0.5 us an element
_MOST_REPLACED = 1 << 13  # times that a heap takes in an element of more, at about 10 us each


def elements(key):
    """The elements of rows of keys [r, n]."""
    place = lax.broadcasted_iota(jnp.int64, key.shape, 1)
    if key.dtype.itemsize > 4 or key.dtype == jnp.uint32:  # more than 32 bits: counted, from the least
        origin = places_in_order(key, 1)
        ordered = at_places(key, origin, 1)
        new = jnp.pad(ordered[:, 1:] != ordered[:, :-1], ((0, 0), (1, 0)))
        rank = lax.cumsum(new.astype(jnp.int32), axis=1)
        key = at_places(rank, places_in_order(origin.astype(jnp.int32), 1), 1)
    return key.astype(jnp.int64) << 32 | place


def _rank(element):
    return element >> 32


def _place(element):
    return element.astype(jnp.int32)


def _at(x, places):
    return x.at[places].get(mode="promise_in_bounds")


def _stops(here, size, *scans):
    """Where scans stopped, at positions of their own; ``scans`` are pairs (whether it stopped here, the position)."""
    position = jnp.full(here.shape, size, jnp.int32)
    for stopped, at in scans:
        position = jnp.where(stopped, at, position)
    return jnp.zeros(here.shape, jnp.int32).at[position].set(here, mode="drop")


def _partition(x, low, high, active):
    """One partition of each ``active`` part ``[low, high)`` around the median of three: the parts after it."""
    here, middle, last = lax.iota(jnp.int32, x.size), (low + high) // 2, high - 1
    second = jnp.minimum(low + 1, last)
    first, a, b, c = (_at(x, i) for i in (low, second, middle, last))
    a_b, b_c, a_c = _rank(a) < _rank(b), _rank(b) < _rank(c), _rank(a) < _rank(c)
    is_a, is_b = jnp.where(a_b, ~b_c & ~a_c, a_c), jnp.where(a_b, b_c, ~a_c & ~b_c)
    pivot, origin = (jnp.where(is_a, p, jnp.where(is_b, q, r)) for p, q, r in ((a, b, c), (second, middle, last)))
    x = jnp.where(active & (here == low), pivot, jnp.where(active & (here == origin), first, x))

    inside = active & (here > low)
    left, right = inside & (_rank(x) >= _rank(pivot)), inside & (_rank(x) <= _rank(pivot))  # scans from the ends stop
    counts = lax.cumsum(left.astype(jnp.int64) + (right.astype(jnp.int64) << 32))
    lefts = (counts - _at(counts, low)).astype(jnp.int32)  # stops of the left scan up to here
    rights = ((_at(counts, last) - counts) >> 32).astype(jnp.int32)  # and of the right scan after here
    from_left, from_right = left & (lefts <= rights), right & (rights < lefts - left)
    stops = _stops(here, x.size, (from_left, low + lefts), (from_right, high - rights - 1))
    other = _at(stops, jnp.where(from_left, high - lefts, jnp.where(from_right, low + rights + 1, here)))

    before = lefts <= rights  # the scans have not met up to here
    ends = jnp.zeros(x.shape, jnp.int32).at[low].max(jnp.where(before, here + 1, 0), mode="promise_in_bounds")
    cut = _at(ends, low)
    low, high = jnp.where(active & ~before, cut, low), jnp.where(active & before, cut, high)
    return _at(x, jnp.where(from_left | from_right, other, here)), low, high


def _partitioned(rows, low, high, longest, n, nth):
    """Rows partitioned until the parts that ``nth`` is in are no longer than ``longest``, and the parts.

    After so many levels for ``n`` elements the C++ library goes over to a heap; here the parts stay as they are.
    """
    levels = 2 * (n.bit_length() - 1)

    def active(low, high):
        return (high - low > longest) & (low <= nth.reshape(-1)) & (nth.reshape(-1) < high)

    def more(state):
        return (state[3] < levels) & jnp.any(active(state[1], state[2]))

    def step(state):
        x, low, high, level = state
        return *_partition(x, low, high, active(low, high)), level + 1

    start = [a.reshape(-1) for a in (rows, low, high)]
    return [a.reshape(rows.shape) for a in lax.while_loop(more, step, (*start, jnp.int32(0)))[:3]]


def _row_starts(rows):
    return lax.broadcasted_iota(jnp.int32, rows.shape, 0) * rows.shape[1]


def _here(rows):
    return lax.broadcasted_iota(jnp.int32, rows.shape, 1)


def _parts_sorted(rows, part):
    """Rows whose parts, numbered in order, are sorted, equal values left in order."""
    return at_places(rows, places_in_order((part.astype(jnp.int64) << 32) + _rank(rows), 1), 1)


def _select_places(rows, k):
    """The first ``k`` places after ``std::nth_element`` for the ``k``-th and ``std::sort`` of those before it."""
    n, start = rows.shape[1], _row_starts(rows)
    nth = start + (k - 1)
    rows, low, high = _partitioned(rows, start, start + n, 3, n, nth)
    rows = _parts_sorted(rows, jnp.where((low <= nth) & (nth < high), low, start + _here(rows)))[:, :k]
    before, last = rows[:, :-1], rows[:, -1:]
    return _place(lax.concatenate([at_places(before, places_as_introsort(_rank(before), 1), 1), last], 1))


def _sift(heap, hole, length, value):
    """``heap`` with ``value`` at or below ``hole``: down along the greater children to a leaf, and up again."""

    def down(state):
        heap, hole = state
        right = 2 * hole + 2
        child = jnp.where((right >= length) | (_rank(heap[right]) < _rank(heap[right - 1])), right - 1, right)
        return heap.at[hole].set(heap[child]), child

    def rises(state):
        heap, hole_now = state
        return (hole_now > hole) & (_rank(heap[(hole_now - 1) // 2]) < _rank(value))

    def up(state):
        heap, hole = state
        return heap.at[hole].set(heap[(hole - 1) // 2]), (hole - 1) // 2

    heap, leaf = lax.while_loop(lambda s: 2 * s[1] + 1 < length, down, (heap, hole))
    heap, at = lax.while_loop(rises, up, (heap, leaf))
    return heap.at[at].set(value)


def _heap_places(row, k, kept, turns):
    """The first ``k`` places i32[k] of one row, as ``std::partial_sort`` leaves them; ``kept`` after ``turns``."""
    n, size, top = row.shape[0], jnp.int32(k), jnp.int32(0)
    blocks = jnp.pad(_rank(row), (0, -n % _BLOCK), constant_values=jnp.iinfo(jnp.int64).max).reshape(-1, _BLOCK)
    least, count = jnp.min(blocks, 1), len(blocks)

    def heapify(i, heap):
        hole = k // 2 - 1 - i
        return _sift(heap, hole, size, heap[hole])

    def first_smaller(ranks, heap, start):
        smaller = (lax.iota(jnp.int32, len(ranks)) >= start) & (ranks < _rank(heap[0]))
        return jnp.where(jnp.any(smaller), lax.argmax(smaller, 0, jnp.int32), len(ranks))

    def next_smaller(heap, after):  # in the same block, or in the next that has one
        block, start = (after + 1) // _BLOCK, (after + 1) % _BLOCK
        here = first_smaller(blocks[jnp.minimum(block, count - 1)], heap, jnp.where(block < count, start, _BLOCK))
        later = first_smaller(least, heap, block + 1)
        there = first_smaller(blocks[jnp.minimum(later, count - 1)], heap, 0)
        return jnp.where(here < _BLOCK, block * _BLOCK + here, jnp.where(later < count, later * _BLOCK + there, n))

    def replace(state):
        heap, new, turn = state
        heap = _sift(heap, top, size, row[new])
        return heap, next_smaller(heap, new), turn + 1

    def pop(i, heap):
        last = size - 1 - i
        return _sift(heap.at[last].set(heap[0]), top, last, heap[last])

    heap = lax.fori_loop(jnp.int32(0), jnp.int32(k // 2), heapify, row[:k])
    start = heap, next_smaller(heap, size - 1), jnp.int32(0)
    heap, new, _ = lax.while_loop(lambda s: (s[1] < n) & (s[2] < turns), replace, start)
    return jnp.where(new < n, kept, _place(lax.fori_loop(jnp.int32(0), size - 1, pop, heap)))


def can_be_followed(shape, axis, k=None):
    """Whether the order of ``kthvalue``, or of ``topk`` of ``k``, takes no longer to find than is good for its use."""
    return math.prod(shape) <= _MOST_FOLLOWED or (k is not None and 64 * k <= shape[axis])


def top_places(rows, k, kept):
    """The places i32[r, k] of the ``k`` least elements of each row, as eager's ``topk`` gives them.

    ``kept`` of a row from which a heap takes in too many.
    """
    if k * 64 > rows.shape[1]:
        return _select_places(rows, k)
    turns = max(_MOST_REPLACED, _MOST_FOLLOWED // len(rows))
    return jax.vmap(lambda row, kept: _heap_places(row, k, kept, turns))(rows, kept)


def _exchange(x, i, j, wanted):
    """Rows with the elements at ``i`` and ``j`` [r, 1] exchanged where ``wanted``."""
    here, a, b = _here(x), _element(x, i), _element(x, j)
    return jnp.where(wanted & (here == i), b, jnp.where(wanted & (here == j), a, x))


def _element(x, i):
    return jnp.take_along_axis(x, i, 1, mode="promise_in_bounds")


def _quick_select_step(x, low, high, k):
    """One turn of Sedgewick's quick select in the rows that have more than two elements in ``[low, high]``."""
    here, more, second = _here(x), high - low > 1, jnp.minimum(low + 1, high)
    x = _exchange(x, (low + high) >> 1, second, more)
    for i, j in ((second, high), (low, high), (second, low)):
        x = _exchange(x, i, j, more & (_rank(_element(x, i)) > _rank(_element(x, j))))
    pivot = _rank(_element(x, low))
    left = more & (here > low + 1) & (here <= high) & (_rank(x) >= pivot)
    right = more & (here > low) & (here < high) & (_rank(x) <= pivot)
    lefts = lax.cumsum(left.astype(jnp.int32), axis=1)
    rights = lax.cumsum(right.astype(jnp.int32), axis=1, reverse=True)
    from_left, from_right = left & (lefts <= rights), right & (rights <= lefts)
    stops = jax.vmap(lambda here, *scan: _stops(here, x.shape[1], scan))
    right_end, left_end = stops(here, from_right, rights - 1), stops(here, from_left, lefts - 1)
    other = jnp.where(from_left, _element(right_end, jnp.where(from_left, lefts - 1, 0)), here)
    other = jnp.where(from_right & ~from_left, _element(left_end, jnp.where(from_right, rights - 1, 0)), other)
    x = _element(x, other)

    begin = jnp.max(jnp.where(from_left, here, low + 1), 1, keepdims=True)  # the last exchange, and the stops after it
    end = jnp.min(jnp.where(from_right, here, high), 1, keepdims=True)
    i = jnp.min(jnp.where((here > begin) & (_rank(x) >= pivot), here, high), 1, keepdims=True)
    j = jnp.max(jnp.where((here < end) & (here >= low) & (_rank(x) <= pivot), here, low), 1, keepdims=True)
    return _exchange(x, low, j, more), jnp.where(more & (j <= k), i, low), jnp.where(more & (j >= k), j - 1, high)


def kth_places(rows, k):
    """The place i32[r, 1] of the element at ``k`` of each row, as eager's ``kthvalue`` gives it."""
    low = jnp.zeros((rows.shape[0], 1), jnp.int32)
    start = (rows, low, low + (rows.shape[1] - 1))
    x, low, high = lax.while_loop(lambda s: jnp.any(s[2] - s[1] > 1), lambda s: _quick_select_step(*s, k), start)
    two_left = (high == low + 1) & (_rank(_element(x, low)) > _rank(_element(x, high)))
    return _place(_exchange(x, low, high, two_left)[:, k : k + 1])
