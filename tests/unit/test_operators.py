"""What is known of an operator, in every spelling of its name."""

import pytest

from ulpscope.model.names import KINDS
from ulpscope.model.operators import FACTORS_ROUNDED, NAMES, ROLES_OF_COLLECTIVES, Trait, bare, traits


@pytest.mark.parametrize(
    "name",
    ["mm", "aten.mm.default", "aten.mm", "aten::mm", "mm.default", "Aten.mm.default.0.backward", "Torch.mm.3.forward"],
)
def test_a_name_is_known_in_every_spelling(name: str) -> None:
    assert bare(name) == "mm"
    assert Trait.MULTILINEAR in traits(name)


@pytest.mark.parametrize("name", ["div", "div_", "__div__", "Tensor.div", "Tensor.__div__", "aten.div_.Tensor"])
def test_an_in_place_form_and_a_sign_have_the_traits_of_the_operator(name: str) -> None:
    assert Trait.POLE in traits(name)


def test_what_is_said_of_the_in_place_form_is_not_said_of_the_operator() -> None:
    assert Trait.FILLS in traits("copy_")
    assert Trait.FILLS not in traits("copy")


@pytest.mark.parametrize("name", ["mylib.fused.default", "layer1.0.ReLU", "", "_", "__", "::", "."])
def test_nothing_is_known_of_an_unknown_name(name: str) -> None:
    assert traits(name) == Trait(0)


def test_the_reflected_and_draws_no_numbers() -> None:
    assert Trait.RANDOM in traits("rand")
    assert Trait.RANDOM not in traits("__rand__")


def test_a_family_of_operators_is_known_by_how_its_names_begin() -> None:
    assert Trait.NOTES in traits("_scaled_dot_product_of_tomorrow")
    assert Trait.WRITES_ANYTHING in traits("_fused_adamw_.tensor_lr")


def test_a_trait_is_listed_or_a_family_and_its_names_stand_there_once() -> None:
    families = {Trait.WRITES_ANYTHING, Trait.NOTES, Trait.DROPS_INSIDE}
    for trait in Trait:
        names = frozenset(name for name, found in NAMES.items() if trait in found)
        assert (trait in families) != bool(names), trait
        assert not {name for name in names if name.endswith("_") and name[:-1] in names}, trait
        assert not {name for name in names if bare(name) != name}, trait


def test_no_operator_is_called_like_a_kind_of_calls() -> None:
    assert not KINDS & set(NAMES)


def test_a_product_in_place_is_rounded_like_the_product() -> None:
    assert FACTORS_ROUNDED["addmm_"] == FACTORS_ROUNDED["addmm"] == "matmul"


def test_of_a_collective_one_rank_gives_or_gets_never_both_and_a_message_has_one_other_end() -> None:
    for name, roles in ROLES_OF_COLLECTIVES.items():
        assert not (roles.gives and roles.gets), name
        assert not (roles.sends_to and roles.comes_from), name
        assert not (roles.sends_to and roles.writes), name
