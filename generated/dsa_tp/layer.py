"""Kimi K3.1 sparse-attention decode layer, tensor parallel; every rank holds the whole context.

Generated from pipelines/dsa_tp.yaml; do not edit. Schedule proved.

    arch     q  rows         method
    sm_90a   1  1            _front_fork
    sm_90a   1  2-4          _front
    sm_90a   1  5-8, 16, 32  _fork_sparse_decode
    sm_90a   1  64           _fork_split_sparse_decode_mla_value
    sm_90a   4  4, 8         _front
    sm_90a   4  16, 32       _fork_sparse_decode
    sm_90a   4  64           _fork_split_sparse_decode_mla_value
    sm_100a  1  1-4          _late_front
    sm_100a  1  5-8          _fork_prims_ts
    sm_100a  1  16, 32       _fork_trtllm_gen
    sm_100a  1  64           _fork_split_trtllm_gen_value_bmm_mla_gate
    sm_100a  4  4, 8         _fork_prims_ts
    sm_100a  4  16, 32       _fork_trtllm_gen
    sm_100a  4  64           _fork_split_trtllm_gen_value_bmm_mla_gate
"""

from __future__ import annotations

from types import SimpleNamespace

from kpipe.runtime.layer import Layer
from kpipe.runtime.metadata import Step

from .memory import MEMORY, ROWS_CAP
from .ops import OPS


class DsaTpLayer(Layer):
    """One layer on 8 ranks.

    prepare() binds weights and caches and sizes everything that a CUDA graph bakes in; run()
    picks a method by (arch, q, rows) from TABLE and pads rows up to the next declared size.
    """

    NAME = "dsa_tp"
    PACKAGE = __package__
    MEMORY = MEMORY
    OPS = OPS
    RANKS = 8
    ROWS_CAP = ROWS_CAP
    STREAMS = {"side": 0}
    TABLE = {
        ("sm_90a", 1): {
            1: "_front_fork",
            2: "_front",
            3: "_front",
            4: "_front",
            5: "_fork_sparse_decode",
            6: "_fork_sparse_decode",
            7: "_fork_sparse_decode",
            8: "_fork_sparse_decode",
            16: "_fork_sparse_decode",
            32: "_fork_sparse_decode",
            64: "_fork_split_sparse_decode_mla_value",
        },
        ("sm_90a", 4): {
            4: "_front",
            8: "_front",
            16: "_fork_sparse_decode",
            32: "_fork_sparse_decode",
            64: "_fork_split_sparse_decode_mla_value",
        },
        ("sm_100a", 1): {
            1: "_late_front",
            2: "_late_front",
            3: "_late_front",
            4: "_late_front",
            5: "_fork_prims_ts",
            6: "_fork_prims_ts",
            7: "_fork_prims_ts",
            8: "_fork_prims_ts",
            16: "_fork_trtllm_gen",
            32: "_fork_trtllm_gen",
            64: "_fork_split_trtllm_gen_value_bmm_mla_gate",
        },
        ("sm_100a", 4): {
            4: "_fork_prims_ts",
            8: "_fork_prims_ts",
            16: "_fork_trtllm_gen",
            32: "_fork_trtllm_gen",
            64: "_fork_split_trtllm_gen_value_bmm_mla_gate",
        },
    }

    def _front_fork(self, step: Step, at: SimpleNamespace) -> None:
        """Rows 1 (q 1) on sm_90a.

        main  packed_gemm index_front index_scores topk_select sparse_decode mla_value o_proj
        side                          mla_query .............../
        """
        main, side = self.main, self.side
        self.packed_gemm(step.hidden, at.projected)  # dsa_tp.yaml:107
        self.index_front(
            at.wk, at.wv, step.index_slots, self.index_kv, at.index_q8, at.index_w, q_a=at.q_a
        )  # :107
        side.wait_stream(main)
        self.index_scores(
            at.index_q8, at.index_w, self.index_kv, step.index_table, step.lengths, at.scores
        )  # :107
        self.topk_select(
            at.scores, step.lengths, step.block_table, self.latent_kv, at.selected, at.valid
        )  # :107
        with self.on(side):
            self.mla_query(at.q_a, at.kv_a, step.slots, self.latent_kv, query=at.query)  # :108
        main.wait_stream(side)  # sparse_decode needs what side made
        # :107
        self.sparse_decode(self.latent_kv, at.selected, at.valid, query=at.query, latent=at.latent)
        self.mla_value(at.latent, at.gate, step.lengths, at.gated)  # :107
        self.o_proj(at.gated, out=step.out)  # :107

    def _front(self, step: Step, at: SimpleNamespace) -> None:
        """Rows 2-4 (q 1) and 4, 8 (q 4) on sm_90a.

        main  packed_gemm index_front index_scores topk_select sparse_decode mla_value o_proj
        side              mla_query .........................../
        """
        main, side = self.main, self.side
        self.packed_gemm(step.hidden, at.projected)  # dsa_tp.yaml:96
        side.wait_stream(main)
        self.index_front(
            at.wk, at.wv, step.index_slots, self.index_kv, at.index_q8, at.index_w, q_a=at.q_a
        )  # :96
        self.index_scores(
            at.index_q8, at.index_w, self.index_kv, step.index_table, step.lengths, at.scores
        )  # :96
        self.topk_select(
            at.scores, step.lengths, step.block_table, self.latent_kv, at.selected, at.valid
        )  # :96
        with self.on(side):
            self.mla_query(at.q_a, at.kv_a, step.slots, self.latent_kv, query=at.query)  # :97
        main.wait_stream(side)  # sparse_decode needs what side made
        # :96
        self.sparse_decode(self.latent_kv, at.selected, at.valid, query=at.query, latent=at.latent)
        self.mla_value(at.latent, at.gate, step.lengths, at.gated)  # :96
        self.o_proj(at.gated, out=step.out)  # :96

    def _fork_sparse_decode(self, step: Step, at: SimpleNamespace) -> None:
        """Rows 5-8, 16, 32 (q 1) and 16, 32 (q 4) on sm_90a.

        main  packed_gemm query_norm index_gemm dsa_index index_scores topk_select sparse_decode mla_value o_proj
        side              mla_query .............................................../
        """
        main, side = self.main, self.side
        self.packed_gemm(step.hidden, at.projected)  # dsa_tp.yaml:90
        side.wait_stream(main)
        self.query_norm(at.q_a, at.q_c)  # :90
        self.index_gemm(at.q_c, at.index_q)  # :90
        self.dsa_index(
            at.index_q, at.wk, at.wv, step.index_slots, self.index_kv, at.index_q8, at.index_w
        )  # :90
        self.index_scores(
            at.index_q8, at.index_w, self.index_kv, step.index_table, step.lengths, at.scores
        )  # :90
        self.topk_select(
            at.scores, step.lengths, step.block_table, self.latent_kv, at.selected, at.valid
        )  # :90
        with self.on(side):
            self.mla_query(at.q_a, at.kv_a, step.slots, self.latent_kv, query=at.query)  # :91
        main.wait_stream(side)  # sparse_decode needs what side made
        # :90
        self.sparse_decode(self.latent_kv, at.selected, at.valid, query=at.query, latent=at.latent)
        self.mla_value(at.latent, at.gate, step.lengths, at.gated)  # :90
        self.o_proj(at.gated, out=step.out)  # :90

    def _fork_prims_ts(self, step: Step, at: SimpleNamespace) -> None:
        """Rows 5-8 (q 1) and 4, 8 (q 4) on sm_100a.

        main  packed_gemm query_norm index_gemm dsa_index index_scores topk_select prims_ts mla_value o_proj
        side              mla_query .............................................../
        """
        main, side = self.main, self.side
        self.packed_gemm(step.hidden, at.projected)  # dsa_tp.yaml:90
        side.wait_stream(main)
        self.query_norm(at.q_a, at.q_c)  # :90
        self.index_gemm(at.q_c, at.index_q)  # :90
        self.dsa_index(
            at.index_q, at.wk, at.wv, step.index_slots, self.index_kv, at.index_q8, at.index_w
        )  # :90
        self.index_scores(
            at.index_q8, at.index_w, self.index_kv, step.index_table, step.lengths, at.scores
        )  # :90
        self.topk_select(
            at.scores, step.lengths, step.block_table, self.latent_kv, at.selected, at.valid
        )  # :90
        with self.on(side):
            self.mla_query(at.q_a, at.kv_a, step.slots, self.latent_kv, query=at.query)  # :91
        main.wait_stream(side)  # prims_ts needs what side made
        self.prims_ts(
            self.latent_kv, at.selected, at.valid, query=at.query, latent=at.latent, pdl=False
        )  # :90 plain: reads `selected`, `query` before its wait
        self.mla_value(at.latent, at.gate, step.lengths, at.gated)  # :90
        self.o_proj(at.gated, out=step.out)  # :90

    def _fork_trtllm_gen(self, step: Step, at: SimpleNamespace) -> None:
        """Rows 16, 32 (q 1) and 16, 32 (q 4) on sm_100a.

        main  packed_gemm query_norm index_gemm dsa_index index_scores topk_select trtllm_gen mla_value o_proj
        side              mla_query .............................................../
        """
        main, side = self.main, self.side
        self.packed_gemm(step.hidden, at.projected)  # dsa_tp.yaml:90
        side.wait_stream(main)
        self.query_norm(at.q_a, at.q_c)  # :90
        self.index_gemm(at.q_c, at.index_q)  # :90
        self.dsa_index(
            at.index_q, at.wk, at.wv, step.index_slots, self.index_kv, at.index_q8, at.index_w
        )  # :90
        self.index_scores(
            at.index_q8, at.index_w, self.index_kv, step.index_table, step.lengths, at.scores
        )  # :90
        self.topk_select(
            at.scores, step.lengths, step.block_table, self.latent_kv, at.selected, at.valid
        )  # :90
        with self.on(side):
            self.mla_query(at.q_a, at.kv_a, step.slots, self.latent_kv, query=at.query)  # :91
        main.wait_stream(side)  # trtllm_gen needs what side made
        self.trtllm_gen(
            self.latent_kv, at.selected, at.valid, query=at.query, latent=at.latent, pdl=False
        )  # :90 plain: reads `valid` before its wait
        self.mla_value(at.latent, at.gate, step.lengths, at.gated)  # :90
        self.o_proj(at.gated, out=step.out)  # :90

    def _fork_split_sparse_decode_mla_value(self, step: Step, at: SimpleNamespace) -> None:
        """Rows 64 (q 1) and 64 (q 4) on sm_90a.

        main  packed_gemm query_norm index_gemm dsa_index index_scores topk_select sparse_decode mla_value o_proj
        side                         mla_query_split ............................../
        """
        main, side = self.main, self.side
        self.packed_gemm(step.hidden, at.projected)  # dsa_tp.yaml:93
        self.query_norm(at.q_a, at.q_c)  # :93
        side.wait_stream(main)
        self.index_gemm(at.q_c, at.index_q)  # :93
        self.dsa_index(
            at.index_q, at.wk, at.wv, step.index_slots, self.index_kv, at.index_q8, at.index_w
        )  # :93
        self.index_scores(
            at.index_q8, at.index_w, self.index_kv, step.index_table, step.lengths, at.scores
        )  # :93
        self.topk_select(
            at.scores, step.lengths, step.block_table, self.latent_kv, at.selected, at.valid
        )  # :93
        with self.on(side):
            self.mla_query_split(at.q_c, at.kv_a, step.slots, self.latent_kv, query=at.query)  # :94
        main.wait_stream(side)  # sparse_decode needs what side made
        # :93
        self.sparse_decode(self.latent_kv, at.selected, at.valid, query=at.query, latent=at.latent)
        self.mla_value(at.latent, at.gate, step.lengths, at.gated)  # :93
        self.o_proj(at.gated, out=step.out)  # :93

    def _fork_split_trtllm_gen_value_bmm_mla_gate(self, step: Step, at: SimpleNamespace) -> None:
        """Rows 64 (q 1) and 64 (q 4) on sm_100a.

        main  packed_gemm query_norm index_gemm dsa_index index_scores topk_select trtllm_gen value_bmm mla_gate o_proj
        side                         mla_query_split ............................../
        """
        main, side = self.main, self.side
        self.packed_gemm(step.hidden, at.projected)  # dsa_tp.yaml:93
        self.query_norm(at.q_a, at.q_c)  # :93
        side.wait_stream(main)
        self.index_gemm(at.q_c, at.index_q)  # :93
        self.dsa_index(
            at.index_q, at.wk, at.wv, step.index_slots, self.index_kv, at.index_q8, at.index_w
        )  # :93
        self.index_scores(
            at.index_q8, at.index_w, self.index_kv, step.index_table, step.lengths, at.scores
        )  # :93
        self.topk_select(
            at.scores, step.lengths, step.block_table, self.latent_kv, at.selected, at.valid
        )  # :93
        with self.on(side):
            self.mla_query_split(at.q_c, at.kv_a, step.slots, self.latent_kv, query=at.query)  # :94
        main.wait_stream(side)  # trtllm_gen needs what side made
        self.trtllm_gen(
            self.latent_kv, at.selected, at.valid, query=at.query, latent=at.latent, pdl=False
        )  # :93 plain: reads `valid` before its wait
        self.value_bmm(at.latent, at.values, pdl=False)  # :93 plain: it never waits
        self.mla_gate(at.values, at.gate, step.lengths, at.gated)  # :93
        self.o_proj(at.gated, out=step.out)  # :93

    def _late_front(self, step: Step, at: SimpleNamespace) -> None:
        """Rows 1-4 (q 1) on sm_100a.

        main  packed_gemm index_front index_scores topk_select mla_query prims_ts mla_value o_proj
        """
        self.packed_gemm(step.hidden, at.projected)  # dsa_tp.yaml:104
        self.index_front(
            at.wk, at.wv, step.index_slots, self.index_kv, at.index_q8, at.index_w, q_a=at.q_a
        )  # :104
        self.index_scores(
            at.index_q8, at.index_w, self.index_kv, step.index_table, step.lengths, at.scores
        )  # :104
        self.topk_select(
            at.scores, step.lengths, step.block_table, self.latent_kv, at.selected, at.valid
        )  # :104
        self.mla_query(at.q_a, at.kv_a, step.slots, self.latent_kv, query=at.query)  # :104
        self.prims_ts(
            self.latent_kv, at.selected, at.valid, query=at.query, latent=at.latent, pdl=False
        )  # :104 plain: reads `selected`, `query` before its wait
        self.mla_value(at.latent, at.gate, step.lengths, at.gated)  # :104
        self.o_proj(at.gated, out=step.out)  # :104
