"""What an operator is: the one table of operator names. Everybody asks here; no other file lists operators.

A trait holds for a name in every spelling: `mul`, `mul_`, `__mul__`, `Tensor.mul`, `aten.mul.Tensor`, `aten::mul`. What
is listed with an underscore behind it (`copy_`) is said of the in-place form alone. An operator that is not listed has no
traits, and each asker says what that means. To say something new of operators, give `Trait` a member and `_NAMES` the line
of its names; what needs more than yes or no (a position, a word) is a table of its own below.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Flag, auto
from functools import lru_cache


class Trait(Flag):
    """What can be said of an operator."""

    # What those who watch a program must know.
    ASKS = auto()  # for a shape, a type or a flag, and computes nothing
    KEEPS_BOOKS = auto()  # of autograd, and changes no number
    SHARES_MEMORY = auto()  # gives memory away that can then be written behind torch's back, or takes such memory
    REACHES_OUT = auto()  # reads or writes files, hands memory over, or runs code that it is given
    UNINITIALISED = auto()  # its result is memory that nobody has written: nothing to judge
    FILLS = auto()  # writes its first argument without reading it
    WRITES_ANYTHING = auto()  # writes arguments without raising their versions, and not always the same ones
    COMPUTED_ATTRIBUTE = auto()  # an attribute of a tensor that computes; every other attribute is a query
    # How a call is spelled.
    IN_VF = auto()  # msprobe's kind `VF`
    HAS_SIGN = auto()  # a method that an operator sign may stand for
    LONG_LINALG = auto()  # of torch.linalg, and msprobe does not have it: it keeps its long name
    # What comes out.
    RANDOM = auto()  # draws numbers
    COPIES = auto()  # the content of its first argument in another memory
    CASTS = auto()  # its argument as numbers of another floating point type, perhaps
    COPIES_OVER = auto()  # the numbers of its second argument, in the dtype of its first
    COUNTS = auto()  # its argument as whole numbers
    OF_ITS_DTYPE = auto()  # in another precision it would be another operator
    MOVES = auto()  # or chooses among its numbers, and makes none larger
    EXACT = auto()  # moves, chooses or compares, and rounds nothing beyond a cast: the result is known to the bit
    GIVES_BACK = auto()  # what it was given, though its schema does not say so
    MAKES_NUMBERS = auto()  # a tensor of numbers that the program has
    # How it rounds.
    MULTILINEAR = auto()  # sums of products: on the squares of its operands, the square of the scale
    ROUNDED_ONCE = auto()  # one rounding and nothing else: correctly rounded everywhere
    SEVERAL_ROUNDINGS = auto()  # in the working precision are usual: the parts count, not the result alone
    SUMS_BESIDE = auto()  # the first result is a map; the gradients of weight and bias are sums over rows
    ONE_BY_ONE = auto()  # adds up one by one in the dtype of the result: the error grows with the root of the length
    ACCUMULATES = auto()  # if its last argument says so; else it moves
    ROUNDED_FACTOR = auto()  # multiplies by a factor that is rounded first: all results may lean the same way
    STEPWISE = auto()  # products in the working precision: a third of the results is not the nearest number
    CANCELS = auto()  # one plus something near minus one: quick approximations are several units off at a few elements
    CANCELS_INSIDE = auto()  # it works with numbers that its inputs and its result do not show
    SCALES = auto()  # its result may be small because a factor is: nothing cancels there
    AVERAGES = auto()  # its result tells little of what it is made of: near means, and far numbers
    UNEVEN = auto()  # makes much of the smallest elements, whose errors the length of a tensor does not show
    HALF_TO_FLOAT = auto()  # its third argument asks for a wider result
    # Where it is special.
    POLE = auto()  # infinite at some numbers by its nature: that a forward has such an element is no finding
    STEEP = auto()  # finite where its slope is not
    STEPS = auto()  # floats in, and out come steps of them
    CHOOSES = auto()  # values and where they were: a tie may be broken either way
    POOLS = auto()  # the same, of windows
    JUMPS = auto()  # where an operand is a unit larger: both sides are right there
    TELLS = auto()  # what its argument is, or passes it on, and makes nothing of its numbers
    DECIDES = auto()  # what is computed later: other shapes and indices after it are a decision, not an error
    # How it may be run in pieces, or read.
    BY_HEADS = auto()  # attention: each head for itself
    ADDS_DIMENSION = auto()  # its dimensions are those of the result, which has one more
    NOTES = auto()  # its results but the first are notes for its backward, padded with inf
    DROPS_INSIDE = auto()  # marked as random for a dropout, which is a kernel of its own or refused by its definition


# The in-place form of an operator has its traits too, and need not be named.
_NAMES: dict[Trait, str] = {
    Trait.ASKS: """can_cast _conj_physical_ __delete__ dense_dim dim dim_order __dir__ __dlpack_device__ element_size
        __format__ __get__ get_default_dtype get_device _has_compatible_shallow_copy_type has_names __hash__ __index__
        is_autocast_enabled is_coalesced is_complex is_conj is_contiguous is_cpu is_cuda is_distributed
        is_floating_point is_grad_enabled is_inference is_neg is_nonzero_ is_pinned is_same_size is_set_to is_shared
        is_signed is_storage is_tensor _is_view _is_zerotensor __len__ ndimension nelement _nnz numel promote_types
        q_per_channel_axis q_scale q_zero_point qscheme __repr__ result_type __set__ size sparse_dim storage_offset
        __str__ stride sym_float sym_int sym_ite sym_max sym_min sym_not sym_sum __torch_dispatch__ _typed_storage""",
    Trait.KEEPS_BOOKS: """align_as align_to as_subclass _assert backward _backward_hooks __deepcopy__ _enter_autocast
        _enter_dual_level _enter_inference_mode _exit_autocast _exit_dual_level _exit_inference_mode grad grad_fn
        is_leaf _make_subclass _make_wrapper_subclass __reduce__ __reduce_ex__ refine_names register_hook
        register_post_accumulate_grad_hook rename requires_grad_ retain_grad _saved_tensors_hooks _set_grad_enabled
        set_grad_enabled __setstate__""",
    Trait.SHARES_MEMORY: """__array__ as_tensor asarray data data_ptr __dlpack__ from_dlpack from_numpy frombuffer numpy
        set_ share_memory_ storage untyped_storage""",
    Trait.REACHES_OUT: """apply_ cuda __deepcopy__ from_file map_ map2_ npu pin_memory __reduce_ex__ resize_ resize_as_
        __setstate__ sparse_compressed_tensor tensor tolist xpu""",
    Trait.UNINITIALISED: """empty _empty_affine_quantized empty_like empty_permuted empty_quantized empty_strided
        empty_with_format new_empty new_empty_strided resize_ resize_as_ set_""",
    Trait.FILLS: """bernoulli_ cauchy_ copy_ exponential_ fill_ geometric_ log_normal_ normal_ random_ set_
        trunc_normal_ uniform_ zero_""",
    Trait.COMPUTED_ATTRIBUTE: "H T imag mH mT real",
    Trait.IN_VF: "gru gru_cell lstm lstm_cell rnn_relu rnn_relu_cell rnn_tanh rnn_tanh_cell",
    Trait.HAS_SIGN: """add bitwise_and bitwise_left_shift bitwise_or bitwise_right_shift bitwise_xor div eq floor_divide
        ge greater greater_equal gt le less less_equal lt matmul mul ne neg not_equal positive pow remainder sub
        true_divide""",
    Trait.LONG_LINALG: """linalg_cholesky linalg_eig linalg_eigh linalg_eigvals linalg_eigvalsh linalg_ldl_solve
        linalg_lu_solve linalg_solve_triangular linalg_tensorinv""",
    Trait.RANDOM: """alpha_dropout bernoulli cauchy_ exponential_ feature_alpha_dropout fractional_max_pool2d
        fractional_max_pool3d geometric_ gumbel_softmax log_normal_ multinomial normal poisson rand rand_like randint
        randint_like randn randn_like random_ randperm rrelu uniform_""",
    Trait.COPIES: "clone contiguous cpu cuda __deepcopy__ pin_memory",
    Trait.CASTS: "bfloat16 double float half to _to_copy type type_as",
    Trait.COPIES_OVER: "copy",
    Trait.COUNTS: "bool byte char int long short",
    Trait.OF_ITS_DTYPE: "frexp ldexp nextafter",
    Trait.MOVES: """abs adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d cat chunk clamp clamp_max clamp_min
        clone contiguous detach expand expand_as flatten flip gather hardtanh index_select max_pool1d max_pool2d
        max_pool3d movedim narrow neg permute relu relu6 repeat reshape roll select split squeeze stack swapaxes t
        transpose tril triu unbind unflatten unsqueeze view view_as""",
    Trait.EXACT: """abs alias_copy all amax amin aminmax any arange as_strided_scatter bincount bitwise_and bitwise_not
        bitwise_or bitwise_xor bucketize cat ceil channel_shuffle clamp clamp_max clamp_min clone complex
        constant_pad_nd contiguous copy detach_copy diagonal_backward diagonal_scatter embedding eq equal expand_copy
        eye fill flip floor fmax fmin full full_like gather ge gt hardtanh hardtanh_backward histc hstack imag_copy
        index index_copy index_fill index_select is_same_size isfinite isinf isnan le lift_fresh_copy logical_and
        logical_not logical_or logical_xor lt masked_fill masked_scatter masked_select max
        max_pool2d_with_indices_backward maximum min minimum native_channel_shuffle ne neg new_full new_ones new_zeros
        nextafter nonzero one_hot ones ones_like _pad_circular permute_copy pixel_shuffle pixel_unshuffle real_copy
        reflection_pad1d reflection_pad2d reflection_pad3d relu relu6 repeat repeat_interleave replication_pad1d
        replication_pad2d replication_pad3d _reshape_copy roll rot90 round scalar_tensor scatter searchsorted
        select_backward select_copy select_scatter sgn sign slice_backward slice_copy slice_scatter split_copy
        split_with_sizes_copy stack t_copy take take_along_dim threshold threshold_backward to _to_copy tril triu trunc
        unbind_copy unfold_copy upsample_nearest1d upsample_nearest2d upsample_nearest3d _upsample_nearest_exact1d
        _upsample_nearest_exact2d view_as_real_copy view_copy vstack where zero_ zeros zeros_like""",
    Trait.GIVES_BACK: "_unsafe_view wait_tensor _wrap_tensor_autograd",
    Trait.MAKES_NUMBERS: "full scalar_tensor tensor",
    Trait.MULTILINEAR: """adaptive_avg_pool1d _adaptive_avg_pool2d _adaptive_avg_pool2d_backward _adaptive_avg_pool3d
        addbmm addmm _addmm_activation addmv addr avg_pool1d avg_pool2d avg_pool2d_backward avg_pool3d
        avg_pool3d_backward baddbmm bmm col2im _convolution convolution convolution_backward
        convolution_backward_overrideable convolution_overrideable cudnn_convolution cumsum dot embedding_backward
        _embedding_bag embedding_dense_backward gather_backward ger _grouped_mm im2col index_add index_backward
        index_put _index_put_impl linear linear_backward matmul mean miopen_convolution mkldnn_convolution
        mkldnn_linear mm mv nansum outer repeat_interleave_backward scatter_add sum sum_to_size trace unfold_backward
        _unsafe_index_put upsample_bilinear2d upsample_bilinear2d_backward upsample_linear1d upsample_linear1d_backward
        upsample_nearest1d_backward upsample_nearest2d_backward upsample_nearest3d_backward
        _upsample_nearest_exact1d_backward _upsample_nearest_exact2d_backward upsample_trilinear3d
        upsample_trilinear3d_backward vdot""",
    Trait.ROUNDED_ONCE: "add div mul reciprocal rsub sqrt square sub",
    Trait.SEVERAL_ROUNDINGS: """addcdiv addcmul _batch_norm_with_update binary_cross_entropy
        binary_cross_entropy_backward binary_cross_entropy_with_logits cudnn_batch_norm fmod glu glu_backward huber_loss
        huber_loss_backward hypot lerp linspace logit _log_softmax logspace mse_loss mse_loss_backward native_batch_norm
        _native_batch_norm_legit native_group_norm pow prelu _prelu_kernel _prelu_kernel_backward remainder
        smooth_l1_loss smooth_l1_loss_backward""",
    Trait.SUMS_BESIDE: """cudnn_batch_norm_backward native_batch_norm_backward native_group_norm_backward
        native_layer_norm_backward""",
    Trait.ONE_BY_ONE: """cumsum embedding_dense_backward index_add index_put _index_put_impl nll_loss2d_forward
        nll_loss_forward scatter_add""",
    Trait.ACCUMULATES: "index_put _index_put_impl _unsafe_index_put",
    Trait.ROUNDED_FACTOR: """addcdiv addcmul huber_loss_backward lerp mse_loss_backward native_dropout_backward
        smooth_l1_loss_backward""",
    Trait.STEPWISE: "sigmoid_backward special_xlog1py tanh_backward xlogy",
    Trait.CANCELS: "erfc expm1 gelu log1p mish softplus",
    Trait.CANCELS_INSIDE: """batch_norm binary_cross_entropy_with_logits cos cosine_similarity cross_entropy expm1
        group_norm instance_norm kl_div layer_norm log1p log_softmax logsigmoid logsumexp nll_loss normalize
        scaled_dot_product_attention sin softplus std std_mean tan var var_mean""",
    Trait.SCALES: "div divide idiv imul itruediv mul multiply rmul rtruediv truediv",
    Trait.AVERAGES: "mean nanmean norm std std_mean var var_mean vector_norm",
    Trait.UNEVEN: """addcdiv angle atan2 div divide idiv itruediv log log10 log2 normalize rdiv rtruediv sgn sign
        true_divide truediv""",
    Trait.HALF_TO_FLOAT: "_log_softmax _safe_softmax _softmax",
    Trait.POLE: "div log log10 log1p log2 reciprocal rsqrt rtruediv true_divide truediv",
    Trait.STEEP: "acos acosh arccos arccosh arcsin asin float_power pow sqrt",
    Trait.STEPS: """bernoulli ceil floor floor_divide floordiv fmod hardshrink heaviside mod remainder round sgn sign
        threshold trunc""",
    Trait.CHOOSES: "argmax argmin argsort cummax cummin kthvalue max median min mode nanmedian sort topk",
    Trait.POOLS: """adaptive_max_pool2d adaptive_max_pool3d fractional_max_pool2d fractional_max_pool3d
        max_pool2d_with_indices max_pool3d_with_indices""",
    Trait.JUMPS: """cudnn_grid_sampler cudnn_grid_sampler_backward div floor_divide fmod frac _grid_sampler_2d_cpu_fallback
        _grid_sampler_2d_cpu_fallback_backward grid_sampler_2d grid_sampler_2d_backward grid_sampler_3d
        grid_sampler_3d_backward heaviside linspace logspace remainder""",
    Trait.TELLS: """detach eq ge gt is_nonzero isfinite isinf isnan le _local_scalar_dense lt ne ones_like zeros_like""",
    Trait.DECIDES: """all any argmax argmin argsort bernoulli bucketize eq equal ge gt is_nonzero isfinite isinf isnan
        kthvalue le _local_scalar_dense lt masked_select max median min multinomial ne nonzero one_hot searchsorted sort
        topk _unique2 unique_consecutive where""",
    Trait.BY_HEADS: """_scaled_dot_product_cudnn_attention _scaled_dot_product_cudnn_attention_backward
        _scaled_dot_product_efficient_attention _scaled_dot_product_efficient_attention_backward
        _scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_backward
        _scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention_for_cpu_backward""",
    Trait.ADDS_DIMENSION: "diag_embed stack unsqueeze",
}
# Families whose members differ from one version of torch to the next.
_PREFIXES: dict[Trait, str] = {
    Trait.WRITES_ANYTHING: "_fused_ _amp_ _native_batch_norm_legit _batch_norm_with_update cudnn_batch_norm",
    Trait.NOTES: "_scaled_dot_product _efficient_attention _flash_attention _cudnn_attention",
    Trait.DROPS_INSIDE: "_scaled_dot_product scaled_dot_product _fused_sdp_choice",
}


def _listed() -> dict[str, Trait]:
    found: dict[str, Trait] = {}
    for trait, names in _NAMES.items():
        for name in names.split():
            found[name] = found.get(name, Trait(0)) | trait
    return found


NAMES = _listed()
# Kinds of calls, as dumps spell them, and namespaces of torch.
KINDS = frozenset({"Aten", "Distributed", "Functional", "Init", "MindSpeed", "NPU", "Tensor", "Torch", "VF"})
_SPACES = KINDS | {"aten", "c10d", "prim", "prims", "torch", "_c10d_functional", "_c10d_functional_autograd"}


def bare(name: str) -> str:
    """The name of an operator without its kind or namespace, its overload, and what a dump says behind it."""
    if "::" in name:
        name = name.rpartition("::")[2]
    first, _, rest = name.partition(".")
    return rest.partition(".")[0] if rest and first in _SPACES else first


@lru_cache(1 << 14)
def traits(name: str) -> Trait:
    """All that is known of an operator, in any spelling; nothing of an unknown one."""
    name = bare(name)
    found = NAMES.get(name, Trait(0))
    if name == "__rand__":  # the reflected `and`, which draws nothing
        return found
    if name.startswith("__") and name.endswith("__"):
        found |= NAMES.get(name[2:-2], Trait(0))
    elif name.endswith("_"):
        found |= NAMES.get(name[:-1], Trait(0))
    for trait, beginnings in _PREFIXES.items():
        if name.startswith(tuple(beginnings.split())):
            found |= trait
    return found


# --- what needs more than yes or no: by the name of the kernel -------------------------------------------------------

# Products whose factors a library may round first where it is allowed to, and which of its switches says so.
FACTORS_ROUNDED: dict[str, str] = {
    name: switch
    for switch, names in {
        "matmul": """mm addmm bmm baddbmm addbmm mv addmv linear matmul _grouped_mm _addmm_activation
            _scaled_dot_product_efficient_attention _scaled_dot_product_efficient_attention_backward""",
        "conv": "convolution _convolution convolution_backward cudnn_convolution mkldnn_convolution",
        "rnn": "mkldnn_rnn_layer mkldnn_rnn_layer_backward",
    }.items()
    for listed in names.split()
    for name in (listed, listed + "_")
}
# The same of calls of torch, and of attention, which settings name apart.
PRODUCT_KINDS: dict[str, str] = {
    name: kind
    for kind, names in {
        "conv": """conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d conv_tbc convolution _convolution
            convolution_backward convolution_overrideable convolution_backward_overrideable cudnn_convolution mkldnn_convolution""",
        "rnn": "lstm gru rnn rnn_tanh rnn_relu lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell _cudnn_rnn",
        "attention": "scaled_dot_product_attention multi_head_attention_forward",
        "matmul": """linear matmul __matmul__ __rmatmul__ mm bmm addmm addbmm baddbmm addmv mv dot einsum bilinear tensordot
            chain_matmul""",
    }.items()
    for name in names.split()
}
# Where the first factor of a product stands; the other is the next.
FIRST_FACTOR: dict[str, int] = {
    **dict.fromkeys(["mm", "bmm", "matmul", "dot", "mv", "linear"], 0),
    **dict.fromkeys(["addmm", "addmm_", "baddbmm", "baddbmm_", "addmv", "addmv_"], 1),
}
# Kernels that treat every row by itself if their dimension is the last one, and where that argument stands.
ROW_DIMENSION: dict[str, int] = {
    "_softmax": 1,
    "_log_softmax": 1,
    "_softmax_backward_data": 2,
    "_log_softmax_backward_data": 2,
}
# Places of samples are worked out from an operand, which is 1 at the edge: near zero it moves by a unit of that. Which one.
POSITIONS: dict[str, int] = {
    "grid_sampler_2d": 1,
    "grid_sampler_3d": 1,
    "_grid_sampler_2d_cpu_fallback": 1,
    "cudnn_grid_sampler": 1,
    "grid_sampler_2d_backward": 2,
    "grid_sampler_3d_backward": 2,
    "_grid_sampler_2d_cpu_fallback_backward": 2,
    "cudnn_grid_sampler_backward": 2,
}
# Which result is the logarithm of a sum: what the sum is off by relatively, it is off by as it is.
LOGARITHMS: dict[str, int] = {
    "_scaled_dot_product_flash_attention_for_cpu": 1,
    "_scaled_dot_product_flash_attention": 1,
    "logsumexp": 0,
    "logcumsumexp": 0,
    "_logcumsumexp": 0,
}
# Results that are not numbers to compare: a workspace, a state for the backward pass.
OPAQUE_OUTPUTS: dict[str, tuple[int, ...]] = {
    "mkldnn_rnn_layer": (3,),
    "_scaled_dot_product_flash_attention": (2, 3, 4, 5, 6, 7, 8),
    "_scaled_dot_product_efficient_attention": (2, 3),
    "_scaled_dot_product_cudnn_attention": (2, 3, 4, 5, 6, 7, 8),
    "_cudnn_rnn": (3, 4),
    "cudnn_batch_norm": (3,),
}
# Written by kernels whose schema does not say so.
HIDDEN_WRITES: dict[str, tuple[int, ...]] = dict.fromkeys(
    ("native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm"), (3, 4)
)
# Calls that write tensors without raising their version: which arguments, by position and keyword; () for all of them.
UNSEEN_WRITES: dict[str, tuple[int | str, ...]] = {
    "Functional.batch_norm": (1, 2, "running_mean", "running_var"),
    "Functional.instance_norm": (1, 2, "running_mean", "running_var"),
    "Torch.batch_norm": (3, 4, "running_mean", "running_var"),
    "Torch.instance_norm": (3, 4, "running_mean", "running_var"),
    "Torch.native_batch_norm": (3, 4, "running_mean", "running_var"),
    "Torch.fused_moving_avg_obs_fake_quant": (),
}

# --- communication -------------------------------------------------------------------------------------------------

Place = tuple[int, str]  # an argument: by position and by keyword


@dataclass(frozen=True, slots=True)
class Roles:
    """Who does what in a call of torch.distributed.

    writes: the argument it writes; `reads_it`: what was there before is read. gives, gets: which argument names the one
    rank that gives, or gets. sends_to, comes_from: which names the other end of a message. shares: all members hold the
    same afterwards. `apart`: torch.NAME is another function.
    """

    writes: Place | None = None
    reads_it: bool = False
    gives: Place | None = None
    gets: Place | None = None
    sends_to: Place | None = None
    comes_from: Place | None = None
    shares: bool = False
    apart: bool = False


_TENSOR: Place = (0, "tensor")
_OUTPUT: Place = (0, "output")
_WHOLE: Place = (0, "output_tensor")
ROLES_OF_COLLECTIVES: dict[str, Roles] = {
    "send": Roles(sends_to=(1, "dst")),
    "isend": Roles(sends_to=(1, "dst")),
    "barrier": Roles(),
    "recv": Roles(_TENSOR, comes_from=(1, "src")),
    "irecv": Roles(_TENSOR, comes_from=(1, "src")),
    "broadcast": Roles(_TENSOR, reads_it=True, gives=(1, "src"), shares=True),
    "all_reduce": Roles(_TENSOR, reads_it=True, shares=True),
    "reduce": Roles(_TENSOR, reads_it=True, gets=(1, "dst")),
    "all_reduce_coalesced": Roles((0, "tensors"), reads_it=True, shares=True),
    "all_gather": Roles((0, "tensor_list"), shares=True),
    "all_gather_into_tensor": Roles(_WHOLE, shares=True),
    "_all_gather_base": Roles(_WHOLE, shares=True),
    "all_gather_coalesced": Roles((0, "output_tensor_lists"), shares=True),
    "gather": Roles((1, "gather_list"), gets=(2, "dst"), apart=True),
    "scatter": Roles(_TENSOR, gives=(2, "src"), apart=True),
    "reduce_scatter": Roles(_OUTPUT),
    "reduce_scatter_tensor": Roles(_OUTPUT),
    "_reduce_scatter_base": Roles(_OUTPUT),
    "all_to_all": Roles((0, "output_tensor_list")),
    "all_to_all_single": Roles(_OUTPUT),
    "batch_isend_irecv": Roles((0, "p2p_op_list"), reads_it=True),
}


@dataclass(frozen=True, slots=True)
class Way:
    """What a kernel of a collective does, where what a rank gives stands among its arguments, and where what it gets:
    among them, or in the result (None). `split`: tensors there have the parts of all ranks one behind the other.
    """

    kind: str
    given: int
    got: int | None
    split_given: bool = False
    split_got: bool = False


_SUM = Way("allreduce", 0, 0)
_NEW_SUM = Way("allreduce", 0, None)
_NEW_GATHER = Way("allgather", 0, None, split_got=True)
_NEW_SCATTER = Way("reduce_scatter", 0, None, split_given=True)
WAYS_OF_COLLECTIVES: dict[str, Way] = {
    "c10d.allreduce_": _SUM,
    "c10d.allreduce_coalesced_": _SUM,
    "c10d.broadcast_": Way("broadcast", 0, 0),
    "c10d.allgather_": Way("allgather", 1, 0),
    "c10d.allgather_coalesced_": Way("allgather", 1, 0),
    "c10d._allgather_base_": Way("allgather", 1, 0, split_got=True),
    "c10d.allgather_into_tensor_coalesced_": Way("allgather", 1, 0, split_got=True),
    "c10d.reduce_scatter_": Way("reduce_scatter", 1, 0),
    "c10d._reduce_scatter_base_": Way("reduce_scatter", 1, 0, split_given=True),
    "c10d.reduce_scatter_tensor_coalesced_": Way("reduce_scatter", 1, 0, split_given=True),
    "_c10d_functional.all_reduce": _NEW_SUM,
    "_c10d_functional.all_reduce_": _NEW_SUM,
    "_c10d_functional.all_reduce_coalesced": _NEW_SUM,
    "_c10d_functional.all_reduce_coalesced_": _NEW_SUM,
    "_c10d_functional.broadcast": Way("broadcast", 0, None),
    "_c10d_functional.broadcast_": Way("broadcast", 0, None),
    "_c10d_functional.all_gather_into_tensor": _NEW_GATHER,
    "_c10d_functional.all_gather_into_tensor_coalesced": _NEW_GATHER,
    "_c10d_functional.reduce_scatter_tensor": _NEW_SCATTER,
    "_c10d_functional.reduce_scatter_tensor_coalesced": _NEW_SCATTER,
}
