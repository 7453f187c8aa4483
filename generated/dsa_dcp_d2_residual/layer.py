"""dsa_dcp on 2 ranks; the output is the new residual stream.

Generated from pipelines/dsa_dcp_d2_residual.yaml; do not edit. Schedule proved.

    arch     q  rows       method
    sm_90a   1  2          _wait_sparse_decode
    sm_90a   1  8, 16, 32  _fork_sparse_decode
    sm_90a   1  64         _fork_sparse_decode_two_shot
    sm_90a   4  8, 16, 32  _fork_sparse_decode
    sm_90a   4  64         _fork_sparse_decode_two_shot
    sm_100a  1  2          _wait_prims_ts
    sm_100a  1  8          _fork_prims_ts
    sm_100a  1  16, 32     _fork_trtllm_gen
    sm_100a  1  64         _fork_trtllm_gen_two_shot
    sm_100a  4  8          _fork_prims_ts
    sm_100a  4  16, 32     _fork_trtllm_gen
    sm_100a  4  64         _fork_trtllm_gen_two_shot
"""

from __future__ import annotations

from types import SimpleNamespace

from kpipe.runtime.layer import Layer
from kpipe.runtime.metadata import Step

from .memory import MEMORY, ROWS_CAP
from .ops import OPS


class DsaDcpD2ResidualLayer(Layer):
    """One layer on 2 ranks, contexts sharded over them.

    prepare() binds weights and caches and sizes everything that a CUDA graph bakes in; run()
    picks a method by (arch, q, rows) from TABLE and pads rows up to the next declared size.
    """

    NAME = "dsa_dcp_d2_residual"
    PACKAGE = __package__
    MEMORY = MEMORY
    OPS = OPS
    RANKS = 2
    INTERLEAVE = 1
    CONTEXT_PARALLEL = True
    ROWS_CAP = ROWS_CAP
    STREAMS = {"side": 0}
    TABLE = {
        ("sm_90a", 1): {
            2: "_wait_sparse_decode",
            8: "_fork_sparse_decode",
            16: "_fork_sparse_decode",
            32: "_fork_sparse_decode",
            64: "_fork_sparse_decode_two_shot",
        },
        ("sm_90a", 4): {
            8: "_fork_sparse_decode",
            16: "_fork_sparse_decode",
            32: "_fork_sparse_decode",
            64: "_fork_sparse_decode_two_shot",
        },
        ("sm_100a", 1): {
            2: "_wait_prims_ts",
            8: "_fork_prims_ts",
            16: "_fork_trtllm_gen",
            32: "_fork_trtllm_gen",
            64: "_fork_trtllm_gen_two_shot",
        },
        ("sm_100a", 4): {
            8: "_fork_prims_ts",
            16: "_fork_trtllm_gen",
            32: "_fork_trtllm_gen",
            64: "_fork_trtllm_gen_two_shot",
        },
    }

    def _wait_sparse_decode(self, step: Step, at: SimpleNamespace) -> None:
        """Rows 2 (q 1) on sm_90a.

        main  packed_gemm mla_query index_front index_scores topk_local topk_merge query_wait sparse_decode dcp_value o_proj o_reduce
        """
        self.packed_gemm(step.hidden, at.projected)  # dsa_dcp.yaml:102
        self.mla_query(
            at.q_a,
            at.kv_a,
            step.slots,
            self.latent_kv,
            q_mail=at.q_mail,
            q_c=at.q_c,
            writes_q_c=True,
        )  # :102
        self.index_front(
            at.wk,
            at.wv,
            step.index_slots,
            self.index_kv,
            at.index_q8,
            at.index_w,
            q_c=at.q_c,
            normalized=True,
        )  # :102
        self.index_scores(
            at.index_q8, at.index_w, self.index_kv, step.index_table, step.lengths, at.scores
        )  # :102
        self.topk_local(at.scores, step.lengths, at.candidates)  # :102
        self.topk_merge(
            at.candidates,
            step.lengths,
            step.block_table,
            self.latent_kv,
            at.selected,
            at.valid,
            pdl=False,
        )  # :102 plain: polls `candidates`
        self.query_wait(at.q_mail, rows=at.rows, pdl=False)  # :102 plain: polls `q_mail`
        self.sparse_decode(
            self.latent_kv,
            at.selected,
            at.valid,
            q_mail=at.q_mail,
            partial=at.partial,
            partial_lse=at.partial_lse,
        )  # :102
        self.dcp_value(
            at.valid,
            at.gate,
            step.lengths,
            at.q_mail,
            at.partial_mail,
            at.lse_mail,
            at.gated,
            partial=at.partial,
            partial_lse=at.partial_lse,
            pushes=True,
            pdl=False,
        )  # :102 plain: polls `partial_mail`, `lse_mail`
        self.o_proj(at.gated, o_mail=at.o_mail)  # :102
        # :102 plain: polls `o_mail`
        self.o_reduce(at.o_mail, step.out, prefix=step.prefix, add_prefix=True, pdl=False)

    def _wait_prims_ts(self, step: Step, at: SimpleNamespace) -> None:
        """Rows 2 (q 1) on sm_100a.

        main  packed_gemm mla_query index_front index_scores topk_local topk_merge query_wait prims_ts dcp_value o_proj o_reduce
        """
        self.packed_gemm(step.hidden, at.projected)  # dsa_dcp.yaml:102
        self.mla_query(
            at.q_a,
            at.kv_a,
            step.slots,
            self.latent_kv,
            q_mail=at.q_mail,
            q_c=at.q_c,
            writes_q_c=True,
        )  # :102
        self.index_front(
            at.wk,
            at.wv,
            step.index_slots,
            self.index_kv,
            at.index_q8,
            at.index_w,
            q_c=at.q_c,
            normalized=True,
        )  # :102
        self.index_scores(
            at.index_q8, at.index_w, self.index_kv, step.index_table, step.lengths, at.scores
        )  # :102
        self.topk_local(at.scores, step.lengths, at.candidates)  # :102
        self.topk_merge(
            at.candidates,
            step.lengths,
            step.block_table,
            self.latent_kv,
            at.selected,
            at.valid,
            pdl=False,
        )  # :102 plain: polls `candidates`
        self.query_wait(at.q_mail, rows=at.rows, pdl=False)  # :102 plain: polls `q_mail`
        self.prims_ts(
            self.latent_kv,
            at.selected,
            at.valid,
            q_mail=at.q_mail,
            partial=at.partial,
            partial_lse=at.partial_lse,
            pdl=False,
        )  # :102 plain: reads `selected`, `q_mail` before its wait
        self.dcp_value(
            at.valid,
            at.gate,
            step.lengths,
            at.q_mail,
            at.partial_mail,
            at.lse_mail,
            at.gated,
            partial=at.partial,
            partial_lse=at.partial_lse,
            pushes=True,
            lse_base="e",
            pdl=False,
        )  # :102 plain: polls `partial_mail`, `lse_mail`
        self.o_proj(at.gated, o_mail=at.o_mail)  # :102
        # :102 plain: polls `o_mail`
        self.o_reduce(at.o_mail, step.out, prefix=step.prefix, add_prefix=True, pdl=False)

    def _fork_sparse_decode(self, step: Step, at: SimpleNamespace) -> None:
        """Rows 8, 16, 32 (q 1) and 8, 16, 32 (q 4) on sm_90a.

        main  packed_gemm query_norm index_gemm dsa_index index_scores topk_local topk_merge sparse_decode dcp_value o_proj o_reduce
        side              mla_query query_wait ............................................../
        """
        main, side = self.main, self.side
        self.packed_gemm(step.hidden, at.projected)  # dsa_dcp.yaml:95
        side.wait_stream(main)
        self.query_norm(at.q_a, at.q_c)  # :95
        self.index_gemm(at.q_c, at.index_q)  # :95
        self.dsa_index(
            at.index_q, at.wk, at.wv, step.index_slots, self.index_kv, at.index_q8, at.index_w
        )  # :95
        self.index_scores(
            at.index_q8, at.index_w, self.index_kv, step.index_table, step.lengths, at.scores
        )  # :95
        self.topk_local(at.scores, step.lengths, at.candidates)  # :95
        self.topk_merge(
            at.candidates,
            step.lengths,
            step.block_table,
            self.latent_kv,
            at.selected,
            at.valid,
            pdl=False,
        )  # :95 plain: polls `candidates`
        with self.on(side):
            self.mla_query(at.q_a, at.kv_a, step.slots, self.latent_kv, q_mail=at.q_mail)  # :97
            self.query_wait(at.q_mail, rows=at.rows, pdl=False)  # :97 plain: polls `q_mail`
        main.wait_stream(side)  # sparse_decode needs what side made
        self.sparse_decode(
            self.latent_kv,
            at.selected,
            at.valid,
            q_mail=at.q_mail,
            partial=at.partial,
            partial_lse=at.partial_lse,
        )  # :96
        self.dcp_value(
            at.valid,
            at.gate,
            step.lengths,
            at.q_mail,
            at.partial_mail,
            at.lse_mail,
            at.gated,
            partial=at.partial,
            partial_lse=at.partial_lse,
            pushes=True,
            pdl=False,
        )  # :96 plain: polls `partial_mail`, `lse_mail`
        self.o_proj(at.gated, o_mail=at.o_mail)  # :96
        # :96 plain: polls `o_mail`
        self.o_reduce(at.o_mail, step.out, prefix=step.prefix, add_prefix=True, pdl=False)

    def _fork_sparse_decode_two_shot(self, step: Step, at: SimpleNamespace) -> None:
        """Rows 64 (q 1) and 64 (q 4) on sm_90a.

        main  packed_gemm query_norm index_gemm dsa_index index_scores topk_local topk_merge sparse_decode dcp_value o_proj o_reduce
        side              mla_query query_wait ............................................../
        """
        main, side = self.main, self.side
        self.packed_gemm(step.hidden, at.projected)  # dsa_dcp.yaml:95
        side.wait_stream(main)
        self.query_norm(at.q_a, at.q_c)  # :95
        self.index_gemm(at.q_c, at.index_q)  # :95
        self.dsa_index(
            at.index_q, at.wk, at.wv, step.index_slots, self.index_kv, at.index_q8, at.index_w
        )  # :95
        self.index_scores(
            at.index_q8, at.index_w, self.index_kv, step.index_table, step.lengths, at.scores
        )  # :95
        self.topk_local(at.scores, step.lengths, at.candidates)  # :95
        self.topk_merge(
            at.candidates,
            step.lengths,
            step.block_table,
            self.latent_kv,
            at.selected,
            at.valid,
            pdl=False,
        )  # :95 plain: polls `candidates`
        with self.on(side):
            self.mla_query(at.q_a, at.kv_a, step.slots, self.latent_kv, q_mail=at.q_mail)  # :97
            self.query_wait(at.q_mail, rows=at.rows, pdl=False)  # :97 plain: polls `q_mail`
        main.wait_stream(side)  # sparse_decode needs what side made
        self.sparse_decode(
            self.latent_kv,
            at.selected,
            at.valid,
            q_mail=at.q_mail,
            partial=at.partial,
            partial_lse=at.partial_lse,
        )  # :96
        self.dcp_value(
            at.valid,
            at.gate,
            step.lengths,
            at.q_mail,
            at.partial_mail,
            at.lse_mail,
            at.gated,
            partial=at.partial,
            partial_lse=at.partial_lse,
            pushes=True,
            pdl=False,
        )  # :96 plain: polls `partial_mail`, `lse_mail`
        self.o_proj(at.gated, o_mail=at.o_mail, two_shot=True)  # :96
        self.o_reduce(
            at.o_mail,
            step.out,
            o_gather=at.o_gather,
            prefix=step.prefix,
            add_prefix=True,
            two_shot=True,
            pdl=False,
        )  # :96 plain: polls `o_mail`, `o_gather`

    def _fork_prims_ts(self, step: Step, at: SimpleNamespace) -> None:
        """Rows 8 (q 1) and 8 (q 4) on sm_100a.

        main  packed_gemm query_norm index_gemm dsa_index index_scores topk_local topk_merge prims_ts dcp_value o_proj o_reduce
        side              mla_query query_wait ............................................../
        """
        main, side = self.main, self.side
        self.packed_gemm(step.hidden, at.projected)  # dsa_dcp.yaml:95
        side.wait_stream(main)
        self.query_norm(at.q_a, at.q_c)  # :95
        self.index_gemm(at.q_c, at.index_q)  # :95
        self.dsa_index(
            at.index_q, at.wk, at.wv, step.index_slots, self.index_kv, at.index_q8, at.index_w
        )  # :95
        self.index_scores(
            at.index_q8, at.index_w, self.index_kv, step.index_table, step.lengths, at.scores
        )  # :95
        self.topk_local(at.scores, step.lengths, at.candidates)  # :95
        self.topk_merge(
            at.candidates,
            step.lengths,
            step.block_table,
            self.latent_kv,
            at.selected,
            at.valid,
            pdl=False,
        )  # :95 plain: polls `candidates`
        with self.on(side):
            self.mla_query(at.q_a, at.kv_a, step.slots, self.latent_kv, q_mail=at.q_mail)  # :97
            self.query_wait(at.q_mail, rows=at.rows, pdl=False)  # :97 plain: polls `q_mail`
        main.wait_stream(side)  # prims_ts needs what side made
        self.prims_ts(
            self.latent_kv,
            at.selected,
            at.valid,
            q_mail=at.q_mail,
            partial=at.partial,
            partial_lse=at.partial_lse,
            pdl=False,
        )  # :96 plain: reads `selected`, `q_mail` before its wait
        self.dcp_value(
            at.valid,
            at.gate,
            step.lengths,
            at.q_mail,
            at.partial_mail,
            at.lse_mail,
            at.gated,
            partial=at.partial,
            partial_lse=at.partial_lse,
            pushes=True,
            lse_base="e",
            pdl=False,
        )  # :96 plain: polls `partial_mail`, `lse_mail`
        self.o_proj(at.gated, o_mail=at.o_mail)  # :96
        # :96 plain: polls `o_mail`
        self.o_reduce(at.o_mail, step.out, prefix=step.prefix, add_prefix=True, pdl=False)

    def _fork_trtllm_gen(self, step: Step, at: SimpleNamespace) -> None:
        """Rows 16, 32 (q 1) and 16, 32 (q 4) on sm_100a.

        main  packed_gemm query_norm index_gemm dsa_index index_scores topk_local topk_merge trtllm_gen dcp_value o_proj o_reduce
        side              mla_query query_wait ............................................../
        """
        main, side = self.main, self.side
        self.packed_gemm(step.hidden, at.projected)  # dsa_dcp.yaml:95
        side.wait_stream(main)
        self.query_norm(at.q_a, at.q_c)  # :95
        self.index_gemm(at.q_c, at.index_q)  # :95
        self.dsa_index(
            at.index_q, at.wk, at.wv, step.index_slots, self.index_kv, at.index_q8, at.index_w
        )  # :95
        self.index_scores(
            at.index_q8, at.index_w, self.index_kv, step.index_table, step.lengths, at.scores
        )  # :95
        self.topk_local(at.scores, step.lengths, at.candidates)  # :95
        self.topk_merge(
            at.candidates,
            step.lengths,
            step.block_table,
            self.latent_kv,
            at.selected,
            at.valid,
            pdl=False,
        )  # :95 plain: polls `candidates`
        with self.on(side):
            self.mla_query(at.q_a, at.kv_a, step.slots, self.latent_kv, q_mail=at.q_mail)  # :97
            self.query_wait(at.q_mail, rows=at.rows, pdl=False)  # :97 plain: polls `q_mail`
        main.wait_stream(side)  # trtllm_gen needs what side made
        self.trtllm_gen(
            self.latent_kv,
            at.selected,
            at.valid,
            q_mail=at.q_mail,
            partial=at.partial,
            partial_lse=at.partial_lse,
            pdl=False,
        )  # :96 plain: reads `valid` before its wait
        self.dcp_value(
            at.valid,
            at.gate,
            step.lengths,
            at.q_mail,
            at.partial_mail,
            at.lse_mail,
            at.gated,
            partial=at.partial,
            partial_lse=at.partial_lse,
            pushes=True,
            pdl=False,
        )  # :96 plain: polls `partial_mail`, `lse_mail`
        self.o_proj(at.gated, o_mail=at.o_mail)  # :96
        # :96 plain: polls `o_mail`
        self.o_reduce(at.o_mail, step.out, prefix=step.prefix, add_prefix=True, pdl=False)

    def _fork_trtllm_gen_two_shot(self, step: Step, at: SimpleNamespace) -> None:
        """Rows 64 (q 1) and 64 (q 4) on sm_100a.

        main  packed_gemm query_norm index_gemm dsa_index index_scores topk_local topk_merge trtllm_gen dcp_value o_proj o_reduce
        side              mla_query query_wait ............................................../
        """
        main, side = self.main, self.side
        self.packed_gemm(step.hidden, at.projected)  # dsa_dcp.yaml:95
        side.wait_stream(main)
        self.query_norm(at.q_a, at.q_c)  # :95
        self.index_gemm(at.q_c, at.index_q)  # :95
        self.dsa_index(
            at.index_q, at.wk, at.wv, step.index_slots, self.index_kv, at.index_q8, at.index_w
        )  # :95
        self.index_scores(
            at.index_q8, at.index_w, self.index_kv, step.index_table, step.lengths, at.scores
        )  # :95
        self.topk_local(at.scores, step.lengths, at.candidates)  # :95
        self.topk_merge(
            at.candidates,
            step.lengths,
            step.block_table,
            self.latent_kv,
            at.selected,
            at.valid,
            pdl=False,
        )  # :95 plain: polls `candidates`
        with self.on(side):
            self.mla_query(at.q_a, at.kv_a, step.slots, self.latent_kv, q_mail=at.q_mail)  # :97
            self.query_wait(at.q_mail, rows=at.rows, pdl=False)  # :97 plain: polls `q_mail`
        main.wait_stream(side)  # trtllm_gen needs what side made
        self.trtllm_gen(
            self.latent_kv,
            at.selected,
            at.valid,
            q_mail=at.q_mail,
            partial=at.partial,
            partial_lse=at.partial_lse,
            pdl=False,
        )  # :96 plain: reads `valid` before its wait
        self.dcp_value(
            at.valid,
            at.gate,
            step.lengths,
            at.q_mail,
            at.partial_mail,
            at.lse_mail,
            at.gated,
            partial=at.partial,
            partial_lse=at.partial_lse,
            pushes=True,
            pdl=False,
        )  # :96 plain: polls `partial_mail`, `lse_mail`
        self.o_proj(at.gated, o_mail=at.o_mail, two_shot=True)  # :96
        self.o_reduce(
            at.o_mail,
            step.out,
            o_gather=at.o_gather,
            prefix=step.prefix,
            add_prefix=True,
            two_shot=True,
            pdl=False,
        )  # :96 plain: polls `o_mail`, `o_gather`
