"""Which rank does what: sizes of the parallel dimensions, from the recipe or from accelerate, and one mesh.

    world = pp x dp_replicate x dp_shard x cp          ep divides dp_shard x cp

    pp             pipeline stages, each with layers of its own (parallel/stages.py)
    dp_replicate   replicas; alone it is DDP, with dp_shard it is HSDP
    dp_shard       FSDP2: weights, gradients and optimizer state in as many shards (parallel/shard.py)
    cp             ranks that share one packed row of tokens (parallel/context.py)
    ep             ranks that share out the experts of every layer (parallel/experts.py)

Ranks of one data group (all `pp` and `cp` ranks of one replica's shard) read the same lanes. What accelerate
is told by its configuration file (FSDP version 2, or `parallelism_config`) means the same sizes; the words in
its environment are read and taken away here, so that accelerate does not shard a second time.
"""

import os
from collections.abc import MutableMapping
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from earlyfusion.kernels.errors import UserError
from earlyfusion.model.config import ModelConfig
from earlyfusion.pipeline.config.schema import ShardSection

PARALLELISM = "PARALLELISM_CONFIG_"
"""Beginning of the words in which accelerate hands its parallelism_config on."""


@dataclass(frozen=True)
class Sizes:
    """Ranks along every dimension."""

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    ep: int = 1

    @property
    def world(self) -> int:
        return self.pp * self.dp_replicate * self.dp_shard * self.cp

    @property
    def plain(self) -> bool:
        """Whether replicas are all there is: one process, or DDP."""
        return self.world == self.dp_replicate and self.ep == 1

    def __str__(self) -> str:
        return " x ".join(f"{field.name} {getattr(self, field.name)}" for field in fields(self))


def sizes_of(section: ShardSection, world: int, environment: MutableMapping[str, str] = os.environ) -> Sizes:
    """The sizes that the recipe and accelerate's configuration ask for, on `world` processes.

    dp_replicate takes what is left where nobody names it. Raises UserError, one line, where the two disagree
    or do not multiply to the world size.
    """
    asked: dict[str, Any] = section.model_dump(include={field.name for field in fields(Sizes)})
    for name, size in told_by_accelerate(environment, world).items():
        if asked[name] not in (None, 1, size):
            raise UserError(
                f"parallel.{name} is {asked[name]} in the recipe, but accelerate was configured for {size}:"
                " say it in one place"
            )
        asked[name] = size

    replicate = asked.pop("dp_replicate")
    rest = Sizes(dp_replicate=1, **asked)
    if world % rest.world or (replicate is not None and replicate * rest.world != world):
        named = f" x dp_replicate {replicate}" if replicate is not None else ""
        wanted = rest.world * (replicate or max(1, round(world / rest.world)))
        raise UserError(
            f"parallel: pp {rest.pp} x dp_shard {rest.dp_shard} x cp {rest.cp}{named} does not give {world}"
            f" processes; start {wanted}, or change the sizes"
        )
    if (rest.dp_shard * rest.cp) % rest.ep:
        raise UserError(
            f"parallel.ep = {rest.ep} does not divide dp_shard x cp = {rest.dp_shard * rest.cp}: experts are"
            " shared out among ranks that shard the model; choose a divisor"
        )
    return Sizes(dp_replicate=world // rest.world, **asked)


def told_by_accelerate(environment: MutableMapping[str, str], world: int) -> dict[str, int]:
    """Sizes by accelerate's FSDP or parallelism configuration; the words are taken out of `environment`.

    Raises UserError for what has no counterpart here: FSDP 1, offloading, tensor or DeepSpeed parallelism.
    """
    told: dict[str, int] = {}
    if environment.pop("ACCELERATE_USE_PARALLELISM_CONFIG", "false").lower() == "true":
        words = {key: environment.pop(key) for key in [*environment] if key.startswith(PARALLELISM)}
        given = {key.removeprefix(PARALLELISM).lower(): value for key, value in words.items()}
        for name in ("dp_replicate", "dp_shard", "cp"):
            told[name] = int(given.get(f"{name}_size", 1))
        for name in ("tp", "sp"):
            if int(given.get(f"{name}_size", 1)) > 1:
                raise UserError(
                    f"accelerate's parallelism_config asks for {name}_size {given[f'{name}_size']}: tensor"
                    " and DeepSpeed sequence parallelism are not here; use dp_shard, cp, ep and pp"
                )

    if environment.pop("ACCELERATE_USE_FSDP", "false").lower() == "true":
        words = {key: environment.pop(key) for key in [*environment] if key.startswith("FSDP_")}
        if words.get("FSDP_VERSION", "1") != "2":
            raise UserError(
                "accelerate was configured for FSDP 1, whose flat shards cut matrices anywhere (Muon needs"
                " them whole): set fsdp_version: 2 in its configuration file"
            )
        if words.get("FSDP_OFFLOAD_PARAMS", "false") == "true":
            raise UserError("fsdp_offload_params: offloading is not here; raise parallel.dp_shard instead")
        # Without a parallelism_config FSDP shards over every process that it is given.
        told.setdefault("dp_shard", world)
    return {name: size for name, size in told.items() if size != 1}


def check_model(sizes: Sizes, config: ModelConfig, pp_virtual: int = 1) -> None:
    """UserError, one line, where a model cannot be cut like this; nothing is built."""
    layers, heads = config.num_hidden_layers, config.num_attention_heads
    if config.num_experts % sizes.ep:
        raise UserError(
            f"parallel.ep = {sizes.ep} does not divide {config.num_experts} experts (model.num_experts);"
            " choose a divisor"
        )
    if sizes.ep > 1 and not config.num_experts:
        raise UserError(f"parallel.ep = {sizes.ep}: the model has no experts; leave it at 1")
    if heads % sizes.cp:
        raise UserError(
            f"parallel.cp = {sizes.cp} does not divide {heads} attention heads (model.num_attention_heads):"
            " every rank attends with whole heads; choose a divisor"
        )
    # A stage that cut a block would have to send the sum that is still growing.
    block = config.attn_res_block_size if config.attn_res == "block" else 1
    stages, blocks = sizes.pp * pp_virtual, -(-layers // block)
    if sizes.pp > 1 and stages > blocks:
        raise UserError(
            f"parallel: {stages} pipeline stages (pp {sizes.pp} x pp_virtual {pp_virtual}) of {layers} layers"
            f" would cut an AttnRes block of {block} layers (model.attn_res_block_size); at most {blocks}"
        )
    if sizes.pp == 1 and pp_virtual > 1:
        raise UserError("parallel.pp_virtual: stages of one process need a pipeline; set parallel.pp too")
    if sizes.pp > 1 and config.tie_word_embeddings:
        raise UserError(
            "parallel.pp: embedding and head are one table (model.tie_word_embeddings), but stand on the"
            " first and the last stage; set model.tie_word_embeddings = false"
        )


def check_encoder(sizes: Sizes, encoder: str) -> None:
    """UserError where the decoupled encoder has no way to the ranks that need its features."""
    if encoder == "decoupled" and (sizes.cp > 1 or sizes.pp > 1):
        raise UserError(
            "parallel.encoder = decoupled goes with dp_replicate, dp_shard and ep, not with cp or pp: leave"
            " it at joint"
        )


def check_stage(sizes: Sizes, name: str, tokens: int, lanes: int) -> None:
    """UserError where rows cannot be cut, or lanes not be dealt out, as the sizes want it."""
    if tokens % sizes.cp:
        raise UserError(
            f"stages.{name}.tokens = {tokens} cannot be cut for parallel.cp = {sizes.cp}: choose a multiple"
        )
    groups = sizes.dp_replicate * sizes.dp_shard
    if lanes % groups:
        what = "processes" if groups == sizes.world else "data groups (dp_replicate x dp_shard)"
        raise UserError(
            f"{lanes} lanes cannot be shared evenly by {groups} {what}: set the stage's lanes to a multiple"
            f" of {groups}, or start a number of processes that divides {lanes}"
        )
    if lanes // groups < sizes.pp:
        raise UserError(
            f"stages.{name}.lanes = {lanes}: {lanes // groups} micro-batches a data group do not fill"
            f" {sizes.pp} pipeline stages; set it to {sizes.pp * groups} or more"
        )


class Layout:
    """The place of this process among all, and the meshes that plans shard over.

    mesh: (pp, dp_replicate, dp_shard, cp); expert_mesh: the same ranks as (pp, dp_replicate, efsdp, ep). Made
    on first use, by every rank alike: plain DDP needs neither.
    """

    def __init__(self, sizes: Sizes, rank: int = 0, device_type: str = "cpu", pp_virtual: int = 1) -> None:
        self.sizes, self.rank, self.device_type, self.pp_virtual = sizes, rank, device_type, pp_virtual
        # cp runs fastest: ranks that exchange most are neighbours.
        rest, self.cp_rank = divmod(rank, sizes.cp)
        self.pp_rank, self.data_rank = divmod(rest, self.data_world)

    @property
    def data_world(self) -> int:
        """Number of data groups: each reads lanes of its own."""
        return self.sizes.dp_replicate * self.sizes.dp_shard

    @property
    def counts(self) -> bool:
        """Whether this rank counts what its data group reads: one of each does."""
        return self.pp_rank == self.cp_rank == 0

    @property
    def sharded(self) -> bool:
        """Whether more than DDP is asked for."""
        return not self.sizes.plain

    @cached_property
    def mesh(self) -> DeviceMesh:
        sizes = self.sizes
        shape = (sizes.pp, sizes.dp_replicate, sizes.dp_shard, sizes.cp)
        mesh = init_device_mesh(
            self.device_type, shape, mesh_dim_names=("pp", "dp_replicate", "dp_shard", "cp")
        )
        # Weights are sharded over data and context ranks alike.
        mesh["dp_shard", "cp"]._flatten("shard")
        mesh["dp_replicate", "dp_shard", "cp"]._flatten("holders")
        return mesh

    @cached_property
    def expert_mesh(self) -> DeviceMesh:
        sizes = self.sizes
        efsdp = sizes.dp_shard * sizes.cp // sizes.ep
        shape = (sizes.pp, sizes.dp_replicate, efsdp, sizes.ep)
        return init_device_mesh(self.device_type, shape, mesh_dim_names=("pp", "dp_replicate", "efsdp", "ep"))

    @cached_property
    def holders(self) -> dist.ProcessGroup:
        """All ranks that hold the same layers: who meets over gradients, loads and largest logits."""
        return self.mesh["holders"].get_group()

    @cached_property
    def names(self) -> dict[str, str]:
        """Name of a process group -> the mesh dimension that it runs along."""
        found: dict[str, str] = {}
        for mesh in [self.mesh, *([self.expert_mesh] if self.sizes.ep > 1 else [])]:
            for name in (*(mesh.mesh_dim_names or ()), *(("shard", "holders") if mesh is self.mesh else ())):
                found.setdefault(mesh[name].get_group().group_name, name)
        return found

    def name_of(self, group: dist.ProcessGroup) -> str:
        """The mesh dimension that a process group runs along; "world" where there is none."""
        return self.names.get(group.group_name, "world") if self.sharded else "world"

    @property
    def sharing(self) -> int:
        """Ranks that hold the very same tensors and share out who writes them."""
        return self.sizes.dp_replicate

    @property
    def copies(self) -> int:
        """Ranks that hold (a part of) the same layers."""
        return self.sizes.world // self.sizes.pp
