"""Small variants of the shipped pipelines, generated on the fly, for tests that run layers."""

from __future__ import annotations

import shutil
from pathlib import Path

from kpipe.codegen.proof.api import prove_pipeline
from kpipe.codegen.render.api import render_pipeline
from kpipe.runtime.generated_folder import load_layer
from kpipe.runtime.layer import Layer

REPOSITORY = Path(__file__).resolve().parents[1]
PIPELINES = REPOSITORY / "pipelines"

# What dsa_dcp with its latents in fp8_ds_mla says otherwise: only cores that read such rows, and a
# BF16 query.
_DS_MLA = """\
caches:
  latent_kv: {format: fp8_ds_mla, page: 64}
stages:
  sparse_core:
    ops: [core]
    variants: {core: {"1-64": sparse_decode}}
"""
_DS_MLA_MAIL = """\
mailboxes:
  q_mail:
    shape: [rows_cap, tp * heads, latent]
    dtype: bf16
    sentinel: 0xFFFFFFFF
    parities: 2
    rearmed_by: dcp_value
"""
# What it says otherwise where rows travel behind W_UV: all of them, or those of larger steps.
_PROJECTED = """\
  value: {ops: [dcp_value], variants: {dcp_value: dcp_value_projected}}
"""
_BY_ROWS = """\
  value:
    ops: [dcp_value]
    variants: {dcp_value: {"1-8": dcp_value, "9-64": dcp_value_projected}}
    with: {dcp_value_projected.partial_mail: value_mail}
"""
_VALUE_MAIL = """\
  {box}:
    shape: [dcp, rows_cap, heads, v_dim]
    dtype: bf16
    sentinel: 0x80000000
    parities: 2
    rearmed_by: dcp_value
"""
_TABLE = """\
overlap:
  table:
    sm_90a: {{{q1}, {q4}}}
    sm_100a: {{{q1}, {q4}}}
"""


class LayerFactory:
    """Renders specs that extend the shipped ones into a project of its own, each once."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._layers: dict[str, type[Layer]] = {}
        (root / "kpipe.toml").write_text("")
        shutil.copytree(PIPELINES, root / "pipelines")

    def folder(self, name: str, text: str) -> Path:
        """The generated folder of a spec that stands beside the shipped ones."""
        spec = self.root / "pipelines" / f"{name}.yaml"
        spec.write_text(text)
        folder = self.root / "generated" / name
        for path, content in render_pipeline(prove_pipeline(str(spec)), ()).items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(content)
        return folder

    def layer(self, name: str, text: str) -> type[Layer]:
        """The layer class of a spec; the same name must always come with the same text."""
        if name not in self._layers:
            self._layers[name] = load_layer(self.folder(name, text))
        return self._layers[name]

    def tp(self, tp: int = 4, *, mode: str = "", ds_mla: bool = False) -> type[Layer]:
        """dsa_tp or dsa_tp_ds in small; with `mode` every step runs in that one."""
        name = "_".join(["tp", str(tp), *(["ds"] if ds_mla else []), *([mode] if mode else [])])
        text = f"parallel: {{tp: {tp}}}\n"
        return self.layer(name, _spec("dsa_tp_ds" if ds_mla else "dsa_tp", name, text, mode))

    def dcp(
        self, ranks: int = 2, interleave: int = 1, *, mode: str = "", ds_mla: bool = False
    ) -> type[Layer]:
        """dsa_dcp in small, contexts sharded; with `mode` every step runs in that one."""
        parts = ["dcp", str(ranks), f"i{interleave}"]
        name = "_".join([*parts, *(["ds"] if ds_mla else []), *([mode] if mode else [])])
        text = f"parallel: {{tp: {ranks}, dcp: {ranks}, interleave: {interleave}}}\n"
        text += _DS_MLA + _DS_MLA_MAIL if ds_mla else ""
        return self.layer(name, _spec("dsa_dcp", name, text, mode))

    def projected(
        self,
        ranks: int = 2,
        interleave: int = 1,
        *,
        mode: str = "",
        ds_mla: bool = False,
        by_rows: bool = False,
    ) -> type[Layer]:
        """dsa_dcp in small, rows sent behind W_UV; `by_rows`: from 9 rows on only."""
        words = ["projected", str(ranks), f"i{interleave}", *(["ds"] if ds_mla else [])]
        name = "_".join([*words, *(["by_rows"] if by_rows else []), *([mode] if mode else [])])
        text = f"parallel: {{tp: {ranks}, dcp: {ranks}, interleave: {interleave}}}\n"
        core, mail = (_DS_MLA, _DS_MLA_MAIL) if ds_mla else ("stages:\n", "mailboxes:\n")
        text += core + (_BY_ROWS if by_rows else _PROJECTED)
        text += mail + _VALUE_MAIL.format(box="value_mail" if by_rows else "partial_mail")
        return self.layer(name, _spec("dsa_dcp", name, text, mode))

    def residual(
        self, ranks: int = 2, *, add_prefix: bool = True, mix: str = "", mode: str = ""
    ) -> type[Layer]:
        """dsa_dcp in small, its sum added to the residual stream; `mix`: AttnRes, its rounding."""
        words = ["residual", str(ranks), *(["add"] if add_prefix else []), *([mix] if mix else [])]
        options = 'reduce: {"1-32": one_shot, "33-64": two_shot}'
        options += ", residual: add_prefix" if add_prefix else ""
        options += ", attn_res: mix_blocks" if mix else ""
        text = f"parallel: {{tp: {ranks}, dcp: {ranks}}}\n"
        text += f"stages:\n  o_proj: {{ops: [o_proj, o_reduce], options: {{{options}}}}}\n"
        text += f"numerics:\n  round: {{mix: {mix}}}\n" if mix else ""
        name = "_".join([*words, *([mode] if mode else [])])
        return self.layer(name, _spec("dsa_dcp", name, text, mode))


def _spec(base: str, name: str, text: str, mode: str) -> str:
    table = (
        _always(mode) if base.startswith("dsa_tp") else _always(mode).replace("fork_split", mode)
    )
    return f"extends: {base}.yaml\nname: {name}\ngeometry: small\n{text}{table}"


def _always(mode: str) -> str:
    """An overlap table that runs everything in one mode.

    Without context parallelism more than 32 rows use the split query, whose norm comes first.
    """
    if not mode:
        return ""
    q1 = f'q1: {{"1-32": {mode}, "33-64": fork_split}}'
    q4 = f'q4: {{"4-32": {mode}, "33-64": fork_split}}'
    return _TABLE.format(q1=q1, q4=q4)
