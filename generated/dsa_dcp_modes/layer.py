"""dsa_dcp on two ranks with every mode in its table, for holding the modes against one another on a GPU; not for serving.

Generated from pipelines/dsa_dcp_modes.yaml; do not edit. Schedule proved.

    arch     q  rows    method
    sm_90a   1  1       _serial_index_front_sparse_decode
    sm_90a   1  2       _front_sparse_decode
    sm_90a   1  3       _wait
    sm_90a   1  4-8     _serial_index_gemm_dsa_index_sparse_decode
    sm_90a   1  16, 32  _fork_1
    sm_90a   1  64      _fork_two_shot
    sm_90a   4  4       _front_sparse_decode
    sm_90a   4  8, 32   _serial_index_gemm_dsa_index_sparse_decode
    sm_90a   4  16      _wait
    sm_90a   4  64      _front_sparse_decode_two_shot
    sm_100a  1  1, 2    _serial_index_front_prims_ts
    sm_100a  1  3-8     _serial_index_gemm_dsa_index_prims_ts
    sm_100a  1  16, 32  _front_trtllm_gen
    sm_100a  1  64      _front_trtllm_gen_two_shot
    sm_100a  4  4, 8    _serial_index_gemm_dsa_index_prims_ts
    sm_100a  4  16, 32  _front_trtllm_gen
    sm_100a  4  64      _front_trtllm_gen_two_shot
"""

from __future__ import annotations

from types import SimpleNamespace

from kpipe.runtime.layer import Layer
from kpipe.runtime.metadata import Step

from .memory import MEMORY, ROWS_CAP
from .ops import OPS


class DsaDcpModesLayer(Layer):
    """One layer on 2 ranks, contexts sharded over them.

    prepare() binds weights and caches and sizes everything that a CUDA graph bakes in; run()
    picks a method by (arch, q, rows) from TABLE and pads rows up to the next declared size.
    """

    NAME = "dsa_dcp_modes"
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
            1: "_serial_index_front_sparse_decode",
            2: "_front_sparse_decode",
            3: "_wait",
            4: "_serial_index_gemm_dsa_index_sparse_decode",
            5: "_serial_index_gemm_dsa_index_sparse_decode",
            6: "_serial_index_gemm_dsa_index_sparse_decode",
            7: "_serial_index_gemm_dsa_index_sparse_decode",
            8: "_serial_index_gemm_dsa_index_sparse_decode",
            16: "_fork_1",
            32: "_fork_1",
            64: "_fork_two_shot",
        },
        ("sm_90a", 4): {
            4: "_front_sparse_decode",
            8: "_serial_index_gemm_dsa_index_sparse_decode",
            16: "_wait",
            32: "_serial_index_gemm_dsa_index_sparse_decode",
            64: "_front_sparse_decode_two_shot",
        },
        ("sm_100a", 1): {
            1: "_serial_index_front_prims_ts",
            2: "_serial_index_front_prims_ts",
            3: "_serial_index_gemm_dsa_index_prims_ts",
            4: "_serial_index_gemm_dsa_index_prims_ts",
            5: "_serial_index_gemm_dsa_index_prims_ts",
            6: "_serial_index_gemm_dsa_index_prims_ts",
            7: "_serial_index_gemm_dsa_index_prims_ts",
            8: "_serial_index_gemm_dsa_index_prims_ts",
            16: "_front_trtllm_gen",
            32: "_front_trtllm_gen",
            64: "_front_trtllm_gen_two_shot",
        },
        ("sm_100a", 4): {
            4: "_serial_index_gemm_dsa_index_prims_ts",
            8: "_serial_index_gemm_dsa_index_prims_ts",
            16: "_front_trtllm_gen",
            32: "_front_trtllm_gen",
            64: "_front_trtllm_gen_two_shot",
        },
    }

    def _serial_index_front_sparse_decode(self, step: Step, at: SimpleNamespace) -> None:
        """Rows 1 (q 1) on sm_90a.

        main  packed_gemm mla_query index_front index_scores topk_local topk_merge sparse_decode dcp_value o_proj o_reduce
        """
        self.packed_gemm(step.hidden, at.projected)  # dsa_dcp.yaml:93
        self.mla_query(
            at.q_a,
            at.kv_a,
            step.slots,
            self.latent_kv,
            q_mail=at.q_mail,
            q_c=at.q_c,
            polls=True,
            writes_q_c=True,
            pdl=False,
            release=False,
        )  # :93 plain: polls `q_mail`; held: polls `q_mail`
        self.index_front(
            at.wk,
            at.wv,
            step.index_slots,
            self.index_kv,
            at.index_q8,
            at.index_w,
            q_c=at.q_c,
            normalized=True,
        )  # :93
        self.index_scores(
            at.index_q8, at.index_w, self.index_kv, step.index_table, step.lengths, at.scores
        )  # :93
        self.topk_local(at.scores, step.lengths, at.candidates)  # :93
        self.topk_merge(
            at.candidates,
            step.lengths,
            step.block_table,
            self.latent_kv,
            at.selected,
            at.valid,
            pdl=False,
        )  # :93 plain: polls `candidates`
        self.sparse_decode(
            self.latent_kv,
            at.selected,
            at.valid,
            q_mail=at.q_mail,
            partial=at.partial,
            partial_lse=at.partial_lse,
        )  # :93
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
        )  # :93 plain: polls `partial_mail`, `lse_mail`
        self.o_proj(at.gated, o_mail=at.o_mail)  # :93
        self.o_reduce(at.o_mail, step.out, pdl=False)  # :93 plain: polls `o_mail`

    def _serial_index_gemm_dsa_index_sparse_decode(self, step: Step, at: SimpleNamespace) -> None:
        """Rows 4-8 (q 1) and 8, 32 (q 4) on sm_90a.

        main  packed_gemm mla_query index_gemm dsa_index index_scores topk_local topk_merge sparse_decode dcp_value o_proj o_reduce
        """
        self.packed_gemm(step.hidden, at.projected)  # dsa_dcp.yaml:93
        self.mla_query(
            at.q_a,
            at.kv_a,
            step.slots,
            self.latent_kv,
            q_mail=at.q_mail,
            q_c=at.q_c,
            polls=True,
            writes_q_c=True,
            pdl=False,
            release=False,
        )  # :93 plain: polls `q_mail`; held: polls `q_mail`
        self.index_gemm(at.q_c, at.index_q)  # :93
        self.dsa_index(
            at.index_q, at.wk, at.wv, step.index_slots, self.index_kv, at.index_q8, at.index_w
        )  # :93
        self.index_scores(
            at.index_q8, at.index_w, self.index_kv, step.index_table, step.lengths, at.scores
        )  # :93
        self.topk_local(at.scores, step.lengths, at.candidates)  # :93
        self.topk_merge(
            at.candidates,
            step.lengths,
            step.block_table,
            self.latent_kv,
            at.selected,
            at.valid,
            pdl=False,
        )  # :93 plain: polls `candidates`
        self.sparse_decode(
            self.latent_kv,
            at.selected,
            at.valid,
            q_mail=at.q_mail,
            partial=at.partial,
            partial_lse=at.partial_lse,
        )  # :93
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
        )  # :93 plain: polls `partial_mail`, `lse_mail`
        self.o_proj(at.gated, o_mail=at.o_mail)  # :93
        self.o_reduce(at.o_mail, step.out, pdl=False)  # :93 plain: polls `o_mail`

    def _serial_index_front_prims_ts(self, step: Step, at: SimpleNamespace) -> None:
        """Rows 1, 2 (q 1) on sm_100a.

        main  packed_gemm mla_query index_front index_scores topk_local topk_merge prims_ts dcp_value o_proj o_reduce
        """
        self.packed_gemm(step.hidden, at.projected)  # dsa_dcp.yaml:93
        self.mla_query(
            at.q_a,
            at.kv_a,
            step.slots,
            self.latent_kv,
            q_mail=at.q_mail,
            q_c=at.q_c,
            polls=True,
            writes_q_c=True,
            pdl=False,
            release=False,
        )  # :93 plain: polls `q_mail`; held: polls `q_mail`
        self.index_front(
            at.wk,
            at.wv,
            step.index_slots,
            self.index_kv,
            at.index_q8,
            at.index_w,
            q_c=at.q_c,
            normalized=True,
        )  # :93
        self.index_scores(
            at.index_q8, at.index_w, self.index_kv, step.index_table, step.lengths, at.scores
        )  # :93
        self.topk_local(at.scores, step.lengths, at.candidates)  # :93
        self.topk_merge(
            at.candidates,
            step.lengths,
            step.block_table,
            self.latent_kv,
            at.selected,
            at.valid,
            pdl=False,
        )  # :93 plain: polls `candidates`
        self.prims_ts(
            self.latent_kv,
            at.selected,
            at.valid,
            q_mail=at.q_mail,
            partial=at.partial,
            partial_lse=at.partial_lse,
            pdl=False,
        )  # :93 plain: reads `selected`, `q_mail` before its wait
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
        )  # :93 plain: polls `partial_mail`, `lse_mail`
        self.o_proj(at.gated, o_mail=at.o_mail)  # :93
        self.o_reduce(at.o_mail, step.out, pdl=False)  # :93 plain: polls `o_mail`

    def _serial_index_gemm_dsa_index_prims_ts(self, step: Step, at: SimpleNamespace) -> None:
        """Rows 3-8 (q 1) and 4, 8 (q 4) on sm_100a.

        main  packed_gemm mla_query index_gemm dsa_index index_scores topk_local topk_merge prims_ts dcp_value o_proj o_reduce
        """
        self.packed_gemm(step.hidden, at.projected)  # dsa_dcp.yaml:93
        self.mla_query(
            at.q_a,
            at.kv_a,
            step.slots,
            self.latent_kv,
            q_mail=at.q_mail,
            q_c=at.q_c,
            polls=True,
            writes_q_c=True,
            pdl=False,
            release=False,
        )  # :93 plain: polls `q_mail`; held: polls `q_mail`
        self.index_gemm(at.q_c, at.index_q)  # :93
        self.dsa_index(
            at.index_q, at.wk, at.wv, step.index_slots, self.index_kv, at.index_q8, at.index_w
        )  # :93
        self.index_scores(
            at.index_q8, at.index_w, self.index_kv, step.index_table, step.lengths, at.scores
        )  # :93
        self.topk_local(at.scores, step.lengths, at.candidates)  # :93
        self.topk_merge(
            at.candidates,
            step.lengths,
            step.block_table,
            self.latent_kv,
            at.selected,
            at.valid,
            pdl=False,
        )  # :93 plain: polls `candidates`
        self.prims_ts(
            self.latent_kv,
            at.selected,
            at.valid,
            q_mail=at.q_mail,
            partial=at.partial,
            partial_lse=at.partial_lse,
            pdl=False,
        )  # :93 plain: reads `selected`, `q_mail` before its wait
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
        )  # :93 plain: polls `partial_mail`, `lse_mail`
        self.o_proj(at.gated, o_mail=at.o_mail)  # :93
        self.o_reduce(at.o_mail, step.out, pdl=False)  # :93 plain: polls `o_mail`

    def _front_sparse_decode(self, step: Step, at: SimpleNamespace) -> None:
        """Rows 2 (q 1) and 4 (q 4) on sm_90a.

        main  packed_gemm index_front index_scores topk_local topk_merge sparse_decode dcp_value o_proj o_reduce
        side              mla_query query_wait ........................../
        """
        main, side = self.main, self.side
        self.packed_gemm(step.hidden, at.projected)  # dsa_dcp.yaml:99
        side.wait_stream(main)
        self.index_front(
            at.wk, at.wv, step.index_slots, self.index_kv, at.index_q8, at.index_w, q_a=at.q_a
        )  # :99
        self.index_scores(
            at.index_q8, at.index_w, self.index_kv, step.index_table, step.lengths, at.scores
        )  # :99
        self.topk_local(at.scores, step.lengths, at.candidates)  # :99
        self.topk_merge(
            at.candidates,
            step.lengths,
            step.block_table,
            self.latent_kv,
            at.selected,
            at.valid,
            pdl=False,
        )  # :99 plain: polls `candidates`
        with self.on(side):
            self.mla_query(at.q_a, at.kv_a, step.slots, self.latent_kv, q_mail=at.q_mail)  # :100
            self.query_wait(at.q_mail, rows=at.rows, pdl=False)  # :100 plain: polls `q_mail`
        main.wait_stream(side)  # sparse_decode needs what side made
        self.sparse_decode(
            self.latent_kv,
            at.selected,
            at.valid,
            q_mail=at.q_mail,
            partial=at.partial,
            partial_lse=at.partial_lse,
        )  # :99
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
        )  # :99 plain: polls `partial_mail`, `lse_mail`
        self.o_proj(at.gated, o_mail=at.o_mail)  # :99
        self.o_reduce(at.o_mail, step.out, pdl=False)  # :99 plain: polls `o_mail`

    def _front_sparse_decode_two_shot(self, step: Step, at: SimpleNamespace) -> None:
        """Rows 64 (q 4) on sm_90a.

        main  packed_gemm index_front index_scores topk_local topk_merge sparse_decode dcp_value o_proj o_reduce
        side              mla_query query_wait ........................../
        """
        main, side = self.main, self.side
        self.packed_gemm(step.hidden, at.projected)  # dsa_dcp.yaml:99
        side.wait_stream(main)
        self.index_front(
            at.wk, at.wv, step.index_slots, self.index_kv, at.index_q8, at.index_w, q_a=at.q_a
        )  # :99
        self.index_scores(
            at.index_q8, at.index_w, self.index_kv, step.index_table, step.lengths, at.scores
        )  # :99
        self.topk_local(at.scores, step.lengths, at.candidates)  # :99
        self.topk_merge(
            at.candidates,
            step.lengths,
            step.block_table,
            self.latent_kv,
            at.selected,
            at.valid,
            pdl=False,
        )  # :99 plain: polls `candidates`
        with self.on(side):
            self.mla_query(at.q_a, at.kv_a, step.slots, self.latent_kv, q_mail=at.q_mail)  # :100
            self.query_wait(at.q_mail, rows=at.rows, pdl=False)  # :100 plain: polls `q_mail`
        main.wait_stream(side)  # sparse_decode needs what side made
        self.sparse_decode(
            self.latent_kv,
            at.selected,
            at.valid,
            q_mail=at.q_mail,
            partial=at.partial,
            partial_lse=at.partial_lse,
        )  # :99
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
        )  # :99 plain: polls `partial_mail`, `lse_mail`
        self.o_proj(at.gated, o_mail=at.o_mail, two_shot=True)  # :99
        # :99 plain: polls `o_mail`, `o_gather`
        self.o_reduce(at.o_mail, step.out, o_gather=at.o_gather, two_shot=True, pdl=False)

    def _front_trtllm_gen(self, step: Step, at: SimpleNamespace) -> None:
        """Rows 16, 32 (q 1) and 16, 32 (q 4) on sm_100a.

        main  packed_gemm index_front index_scores topk_local topk_merge trtllm_gen dcp_value o_proj o_reduce
        side              mla_query query_wait ........................../
        """
        main, side = self.main, self.side
        self.packed_gemm(step.hidden, at.projected)  # dsa_dcp.yaml:99
        side.wait_stream(main)
        self.index_front(
            at.wk, at.wv, step.index_slots, self.index_kv, at.index_q8, at.index_w, q_a=at.q_a
        )  # :99
        self.index_scores(
            at.index_q8, at.index_w, self.index_kv, step.index_table, step.lengths, at.scores
        )  # :99
        self.topk_local(at.scores, step.lengths, at.candidates)  # :99
        self.topk_merge(
            at.candidates,
            step.lengths,
            step.block_table,
            self.latent_kv,
            at.selected,
            at.valid,
            pdl=False,
        )  # :99 plain: polls `candidates`
        with self.on(side):
            self.mla_query(at.q_a, at.kv_a, step.slots, self.latent_kv, q_mail=at.q_mail)  # :100
            self.query_wait(at.q_mail, rows=at.rows, pdl=False)  # :100 plain: polls `q_mail`
        main.wait_stream(side)  # trtllm_gen needs what side made
        self.trtllm_gen(
            self.latent_kv,
            at.selected,
            at.valid,
            q_mail=at.q_mail,
            partial=at.partial,
            partial_lse=at.partial_lse,
            pdl=False,
        )  # :99 plain: reads `valid` before its wait
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
        )  # :99 plain: polls `partial_mail`, `lse_mail`
        self.o_proj(at.gated, o_mail=at.o_mail)  # :99
        self.o_reduce(at.o_mail, step.out, pdl=False)  # :99 plain: polls `o_mail`

    def _front_trtllm_gen_two_shot(self, step: Step, at: SimpleNamespace) -> None:
        """Rows 64 (q 1) and 64 (q 4) on sm_100a.

        main  packed_gemm index_front index_scores topk_local topk_merge trtllm_gen dcp_value o_proj o_reduce
        side              mla_query query_wait ........................../
        """
        main, side = self.main, self.side
        self.packed_gemm(step.hidden, at.projected)  # dsa_dcp.yaml:99
        side.wait_stream(main)
        self.index_front(
            at.wk, at.wv, step.index_slots, self.index_kv, at.index_q8, at.index_w, q_a=at.q_a
        )  # :99
        self.index_scores(
            at.index_q8, at.index_w, self.index_kv, step.index_table, step.lengths, at.scores
        )  # :99
        self.topk_local(at.scores, step.lengths, at.candidates)  # :99
        self.topk_merge(
            at.candidates,
            step.lengths,
            step.block_table,
            self.latent_kv,
            at.selected,
            at.valid,
            pdl=False,
        )  # :99 plain: polls `candidates`
        with self.on(side):
            self.mla_query(at.q_a, at.kv_a, step.slots, self.latent_kv, q_mail=at.q_mail)  # :100
            self.query_wait(at.q_mail, rows=at.rows, pdl=False)  # :100 plain: polls `q_mail`
        main.wait_stream(side)  # trtllm_gen needs what side made
        self.trtllm_gen(
            self.latent_kv,
            at.selected,
            at.valid,
            q_mail=at.q_mail,
            partial=at.partial,
            partial_lse=at.partial_lse,
            pdl=False,
        )  # :99 plain: reads `valid` before its wait
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
        )  # :99 plain: polls `partial_mail`, `lse_mail`
        self.o_proj(at.gated, o_mail=at.o_mail, two_shot=True)  # :99
        # :99 plain: polls `o_mail`, `o_gather`
        self.o_reduce(at.o_mail, step.out, o_gather=at.o_gather, two_shot=True, pdl=False)

    def _wait(self, step: Step, at: SimpleNamespace) -> None:
        """Rows 3 (q 1) and 16 (q 4) on sm_90a.

        main  packed_gemm mla_query index_gemm dsa_index index_scores topk_local topk_merge query_wait sparse_decode dcp_value o_proj o_reduce
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
        self.index_gemm(at.q_c, at.index_q)  # :102
        self.dsa_index(
            at.index_q, at.wk, at.wv, step.index_slots, self.index_kv, at.index_q8, at.index_w
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
        self.o_reduce(at.o_mail, step.out, pdl=False)  # :102 plain: polls `o_mail`

    def _fork_1(self, step: Step, at: SimpleNamespace) -> None:
        """Rows 16, 32 (q 1) on sm_90a.

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
        self.o_reduce(at.o_mail, step.out, pdl=False)  # :96 plain: polls `o_mail`

    def _fork_two_shot(self, step: Step, at: SimpleNamespace) -> None:
        """Rows 64 (q 1) on sm_90a.

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
        # :96 plain: polls `o_mail`, `o_gather`
        self.o_reduce(at.o_mail, step.out, o_gather=at.o_gather, two_shot=True, pdl=False)
