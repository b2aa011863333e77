"""What the host knows, on a device."""

import torch

from disttrain_cli.models.host import constant, to_device, use_cuda

CPU, META = torch.device("cpu"), torch.device("meta")


def test_numbers_keep_their_type_on_the_way():
    assert to_device([1, 2], CPU, torch.int32).dtype == torch.int32
    assert to_device([0.5], CPU).tolist() == [0.5]
    with torch.device("meta"):  # whatever the default is
        assert to_device([3], CPU).tolist() == [3]
    assert to_device(torch.ones(2), META).is_meta


def test_a_constant_is_made_once_for_each_device_and_type():
    made = []

    def make(count):
        made.append(count)
        return torch.arange(count)

    first = constant(make, 3, device=CPU)
    assert constant(make, 3, device=CPU) is first and made == [3]
    assert constant(make, 3, device=CPU, dtype=torch.bfloat16).dtype == torch.bfloat16
    with torch.device("meta"):
        assert constant(make, 4, device=CPU).tolist() == [0, 1, 2, 3]


def test_fp32_on_a_gpu_is_never_rounded_to_tf32(monkeypatch):
    """Also by a process that had asked for TF32; and torch can still say so."""
    chosen = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    try:
        assert use_cuda(3) == torch.device("cuda", 3) and chosen == [torch.device("cuda", 3)]
        assert not (torch.backends.cuda.matmul.allow_tf32 or torch.backends.cudnn.allow_tf32)
        assert (
            torch.backends.cudnn.conv.fp32_precision
            != "tf32"
            != torch.backends.cuda.matmul.fp32_precision
        )
        assert torch.get_float32_matmul_precision() == "highest"
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before
