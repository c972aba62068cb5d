"""Tests that tune() finds what there is to find: csrc's own host code on a pretended library whose
algorithms the tests make up (emulation/cublaslt_entry.cpp)."""

from __future__ import annotations

import ctypes
from collections import Counter

import emulated
import pytest
import torch
from test_fp4_blackwell import H200, Gemm, Operand, aligned
from torch import Tensor

RIGHT, WRONG, UNWRITTEN, FAILS = range(4)
NONE, INPLACE, IN_FP32, IN_OUTPUT = 0, 1, 2, 4  # how parts of K are added up
F32, BF16 = torch.float32, torch.bfloat16
MOST_WORKSPACE = 32 << 20


class Algorithm(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in ("outcome", "splits", "reduction", "workspace")),
        ("us", ctypes.c_double),
    ]


class Saved(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_double) for name in ("first_us", "us")),
        *((name, ctypes.c_int64) for name in ("offered", "tried", "right")),
    ]


def algorithm(
    us: float, outcome: int = RIGHT, splits: int = 1, reduction: int = NONE, workspace: int = 256
) -> Algorithm:
    return Algorithm(outcome, splits, reduction, workspace, us)


class Tuned:
    """The library with algorithms, and GEMMs that nothing else has met."""

    k = 16

    def __init__(self, loaded: ctypes.CDLL) -> None:
        self.loaded = loaded
        loaded.run_gemm.restype = ctypes.c_char_p
        for name in ("plans", "last_algorithm", "pool", "saved"):
            getattr(loaded, name).restype = ctypes.c_int64
        loaded.pretend(*map(ctypes.c_int64, (90, 130100, 1, 1, 0)))

    def offer(self, *algorithms: Algorithm) -> None:
        self.loaded.offer(
            (Algorithm * len(algorithms))(*algorithms), ctypes.c_int64(len(algorithms))
        )

    def new_sizes(self) -> None:
        Tuned.k += 16

    def run(self, dtype: torch.dtype = F32, bias: bool = False, zeros: bool = False) -> int:
        """A GEMM, which is checked; the algorithm that it had at last."""
        m, n, k = 3, 16, self.k
        a, b = (aligned(torch.randn(rows, k).to(BF16)) for rows in (m, n))
        if zeros:
            a.zero_()
        d, c = aligned(torch.full((m, n), -7.0).to(dtype)), aligned(torch.randn(n).to(BF16))
        self.launch(a, b, d, c if bias else None)
        want = a.double() @ b.double().t() + (c.double() if bias else 0)
        torch.testing.assert_close(d.double(), want, rtol=8e-3, atol=8e-3)
        return int(self.loaded.last_algorithm())

    def launch(
        self, a: Tensor, b: Tensor, d: Tensor, bias: Tensor | None = None, ld: int = 0
    ) -> None:
        operands = [Operand(t.data_ptr(), None, t.shape[0], ld or t.shape[1]) for t in (a, b)]
        job = Gemm(
            *d.shape, a.shape[1], {F32: 0, BF16: 1}[d.dtype], *operands, None,
            None if bias is None else bias.data_ptr(), 1, H200, d.data_ptr(),
        )  # fmt: skip
        error = self.loaded.run_gemm(ctypes.byref(job))
        if error is not None:
            raise RuntimeError(error.decode())

    def saved(self) -> list[Saved]:
        there = (Saved * 999)()
        return list(there[: self.loaded.saved(there, ctypes.c_int64(999))])

    def plans(self) -> tuple[int, int]:
        found, made = (self.loaded.plans(ctypes.c_int64(i)) for i in (0, 1))
        return found, made


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    folder, flags = tmp_path_factory.mktemp("tune_emulation"), emulated.with_host_code()
    return emulated.build(folder, "cublaslt_entry.cpp", ["gemm/difference", "gemm/epilogue"], flags)


@pytest.fixture
def tuned(loaded: ctypes.CDLL) -> Tuned:
    library = Tuned(loaded)
    library.new_sizes()
    return library


def tune_once(tuned: Tuned, **kinds: object) -> tuple[int, Saved]:
    before = Counter(bytes(s) for s in tuned.saved())
    tuned.loaded.start_tuning()
    try:
        chosen = tuned.run(**kinds)
    finally:
        tuned.loaded.stop_tuning()
    (new,) = Counter(bytes(s) for s in tuned.saved()) - before
    return chosen, Saved.from_buffer_copy(new)


@pytest.mark.parametrize("kinds", [{}, {"dtype": BF16}, {"dtype": BF16, "bias": True}])
def test_the_fastest_right_one_is_taken(tuned: Tuned, kinds: dict) -> None:
    """By their own time, far below the host's for a launch, which is that of a GEMM here."""
    tuned.offer(
        algorithm(10), algorithm(1, WRONG), algorithm(1, UNWRITTEN), algorithm(1, FAILS),
        algorithm(4, workspace=MOST_WORKSPACE), algorithm(7),
    )  # fmt: skip
    assert tuned.run(**kinds) == 0
    chosen, saved = tune_once(tuned, **kinds)
    assert chosen == 4
    assert (saved.offered, saved.tried, saved.right) == (6, 6, 3)
    assert saved.first_us == pytest.approx(10, rel=0.2)
    assert saved.us == pytest.approx(4, rel=0.2)
    assert tuned.run(**kinds) == 4, "not after it"


def test_the_first_stays_where_none_gains(tuned: Tuned) -> None:
    tuned.offer(algorithm(50), algorithm(49.8), algorithm(60))
    chosen, saved = tune_once(tuned)
    assert chosen == 0
    assert (saved.offered, saved.tried, saved.right) == (3, 3, 3)
    assert saved.us == saved.first_us


def test_what_the_first_answer_lacks_is_asked_for(tuned: Tuned) -> None:
    """Of the eight of the first answer none is fast; of the others those that sum as they come, or
    in the output's type, or whose splits are unsafe, are none."""
    tuned.offer(
        *(algorithm(20 + i) for i in range(8)),
        algorithm(1, splits=2, reduction=INPLACE),
        algorithm(1, splits=2, reduction=IN_OUTPUT),
        algorithm(1, splits=17, reduction=IN_FP32),
        algorithm(9, splits=5, reduction=IN_FP32),
    )
    tuned.k = 560  # 17 splits are 32 each and do not divide it, 5 do
    chosen, saved = tune_once(tuned)
    assert chosen == 11
    assert (saved.offered, saved.tried, saved.right) == (12, 9, 9)


def test_zeros_are_not_measured(tuned: Tuned) -> None:
    tuned.offer(algorithm(10), algorithm(2))
    known = len(tuned.saved())
    tuned.loaded.start_tuning()
    try:
        assert tuned.run(zeros=True) == 0
        assert len(tuned.saved()) == known
        assert tuned.run() == 1
    finally:
        tuned.loaded.stop_tuning()


def test_errors_leave_no_memory(tuned: Tuned) -> None:
    """Neither one of a GEMM nor that there is no room to compare; then it is measured."""
    tuned.loaded.start_tuning()
    try:
        tuned.offer(algorithm(10, FAILS), algorithm(2))
        with pytest.raises(RuntimeError, match="cublasLtMatmul failed: CUBLAS_STATUS"):
            tuned.run()
        tuned.offer(algorithm(10), algorithm(2))
        tuned.loaded.pool(ctypes.c_int64(100))
        with pytest.raises(RuntimeError, match=r"tune: expected \d+ bytes .* got none"):
            tuned.run()
        assert tuned.loaded.pool(ctypes.c_int64(1 << 40)) == 0
        assert tuned.run() == 1
        assert tuned.loaded.pool(ctypes.c_int64(1 << 40)) == 0
    finally:
        tuned.loaded.stop_tuning()


def test_a_loaded_plan_is_taken_and_a_foreign_one_refused_each_time(tuned: Tuned) -> None:
    tuned.offer(algorithm(10), algorithm(2), algorithm(30, workspace=1 << 20))
    assert tune_once(tuned)[0] == 1
    tuned.loaded.load_all(ctypes.c_int64(2))
    assert tuned.run() == 2
    tuned.loaded.load_all(ctypes.c_int64(77))
    for _ in range(2):  # the error leaves no plan that looks settled
        with pytest.raises(RuntimeError, match="expected a plan that this cuBLASLt takes"):
            tuned.run()
    tuned.loaded.load_all(ctypes.c_int64(0))
    assert tuned.run() == 0


def test_plans_outlive_a_full_cache(tuned: Tuned) -> None:
    """A call's second GEMM must not cost it the plan, and so the workspace, of its first."""
    tuned.offer(algorithm(10))
    a, d = aligned(torch.randn(1, 16).to(BF16)), aligned(torch.zeros(1, 8))
    sizes = [24 + 8 * i for i in range(4200)]  # from row to row; a cache has 4096
    b = aligned(torch.zeros(8, sizes[-1]).to(BF16))[:, :16]
    for ld in sizes:
        made = tuned.plans()[1]
        tuned.launch(a, b, d, ld=ld)
        assert tuned.plans()[1] == made + 1, "each is new"
    made = tuned.plans()[1]
    for ld in (sizes[0], sizes[4095], sizes[-1]):
        tuned.launch(a, b, d, ld=ld)
    assert tuned.plans()[1] == made
