from realign.engines.network.cpu_lanes import ParallelPasses
from realign.engines.network.settings import NetworkSettings
from realign.engines.network.torch_compile import TorchCompile


def test_load_balancing_and_compiled_layers_rule_out_parallel_passes() -> None:
    plain, compiled = NetworkSettings(), NetworkSettings(torch_compile=TorchCompile.eager)
    assert plain.allowed(load_balancing=False) == plain
    for found in (plain.allowed(load_balancing=True), compiled.allowed(load_balancing=False)):
        assert found.parallel_passes is ParallelPasses.off
