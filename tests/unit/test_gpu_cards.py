"""How tests/gpu shares the cards of a machine out, on machines that are made up."""

import types

import pytest
from gpu_cards import NUM_DEVICES, cut, plan_for

NUM_CARDS = (1, 2, 3, 4, 8)
MIB = 74 * 1024  # of a card


def test_without_cards_there_are_no_devices():
    plan = plan_for(0)
    assert (plan.cuts, plan.devices(4), plan.is_cut) == ((), (), False)
    assert not any(plan.sums_by_nccl(num) for num in (1, 2, 4))


@pytest.mark.parametrize(("num_cards", "cuts"), [(1, (4,)), (2, (2, 2)), (3, (2, 1, 1)), (4, (1,) * 4), (8, (1,) * 8)])
def test_cards_are_cut_so_that_there_are_four_devices(num_cards, cuts):
    plan = plan_for(num_cards)
    assert plan.cuts == cuts
    assert plan.is_cut == (num_cards < NUM_DEVICES)


@pytest.mark.parametrize("num_cards", NUM_CARDS)
def test_replicas_are_on_different_cards_as_far_as_there_are_and_only_then_summed_by_nccl(num_cards):
    plan = plan_for(num_cards)
    card_of = [card for card, size in enumerate(plan.cuts) for _ in range(size)]
    for num_replicas in (1, 2, 3, 4):
        devices = plan.devices(num_replicas)
        cards = [card_of[device] for device in devices]
        assert len(set(devices)) == num_replicas
        assert len(set(cards)) == min(num_replicas, num_cards)
        assert plan.sums_by_nccl(num_replicas) == (num_replicas > 1 and len(set(cards)) == num_replicas)


def test_of_two_cards_two_replicas_have_one_each():
    assert [plan_for(2).devices(num) for num in (1, 2, 4)] == [(0,), (0, 2), (0, 2, 1, 3)]
    assert [plan_for(3).devices(num) for num in (2, 4)] == [(0, 2), (0, 2, 3, 1)]


@pytest.mark.parametrize("num_cards", NUM_CARDS)
def test_workers_have_cards_in_turn_and_nccl_where_none_shares_its_own(num_cards):
    plan = plan_for(num_cards)
    assert [plan.card_of_worker(task) for task in range(num_cards + 1)] == [*range(num_cards), 0]
    for num_workers in (2, 3):
        assert plan.implementations(num_workers) == (("ring", "nccl") if num_workers <= num_cards else ("ring",))


@pytest.mark.parametrize("num_cards", NUM_CARDS)
@pytest.mark.parametrize("num_processes", [1, 8, 14])
def test_what_processes_and_their_workers_take_fits_on_each_card(num_cards, num_processes):
    plan = plan_for(num_cards, num_processes)
    workers = -(-10 // num_cards) * 1600
    assert num_processes * (900 + max(plan.cuts) * plan.memory_mib) + workers <= MIB
    assert 800 <= plan.memory_mib <= 1536
    assert plan_for(num_cards, num_processes, 512).memory_mib == 512


class Config:
    """`tf.config` of a machine that is made up; it notes what it is told."""

    def __init__(self):
        self.told = {}
        self.visible = None

    def LogicalDeviceConfiguration(self, memory_limit):
        return types.SimpleNamespace(mib=memory_limit)

    def set_visible_devices(self, devices, kind):
        self.visible = (devices, kind)

    def set_logical_device_configuration(self, card, devices):
        self.told[card] = [device.mib for device in devices]


def test_all_cards_of_a_process_are_cut_and_each_device_has_a_limit():
    config = Config()
    cut(config, ["card 0", "card 1", "card 2"], plan_for(3, memory_mib=512))
    assert config.told == {"card 0": [512, 512], "card 1": [512], "card 2": [512]}
    assert config.visible is None


def test_a_worker_sees_one_card_and_has_one_device_with_a_limit():
    config = Config()
    cut(config, ["card 0", "card 1", "card 2"], plan_for(3, memory_mib=512), task=4)
    assert config.told == {"card 1": [512]}
    assert config.visible == (["card 1"], "GPU")
