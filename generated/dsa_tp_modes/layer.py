"""dsa_tp with every mode in its table, for holding the modes against one another on a GPU; not for serving.

Generated from pipelines/dsa_tp_modes.yaml; do not edit. Schedule proved.

    arch     q  rows         method
    sm_90a   1  1            _serial
    sm_90a   1  2            _front
    sm_90a   1  3            _wait
    sm_90a   1  4            _late_front_sparse_decode
    sm_90a   1  5            _late
    sm_90a   1  6-8, 16, 32  _fork_sparse_decode
    sm_90a   1  64           _fork_split_sparse_decode_mla_value
    sm_90a   4  4            _wait
    sm_90a   4  8            _late_front_sparse_decode
    sm_90a   4  16           _late
    sm_90a   4  32           _fork_sparse_decode
    sm_90a   4  64           _fork_split_sparse_decode_mla_value
    sm_100a  1  1-4          _late_front_prims_ts
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


class DsaTpModesLayer(Layer):
    """One layer on 8 ranks.

    prepare() binds weights and caches and sizes everything that a CUDA graph bakes in; run()
    picks a method by (arch, q, rows) from TABLE and pads rows up to the next declared size.
    """

    NAME = "dsa_tp_modes"
    PACKAGE = __package__
    MEMORY = MEMORY
    OPS = OPS
    RANKS = 8
    ROWS_CAP = ROWS_CAP
    STREAMS = {"side": 0}
    TABLE = {
        ("sm_90a", 1): {
            1: "_serial",
            2: "_front",
            3: "_wait",
            4: "_late_front_sparse_decode",
            5: "_late",
            6: "_fork_sparse_decode",
            7: "_fork_sparse_decode",
            8: "_fork_sparse_decode",
            16: "_fork_sparse_decode",
            32: "_fork_sparse_decode",
            64: "_fork_split_sparse_decode_mla_value",
        },
        ("sm_90a", 4): {
            4: "_wait",
            8: "_late_front_sparse_decode",
            16: "_late",
            32: "_fork_sparse_decode",
            64: "_fork_split_sparse_decode_mla_value",
        },
        ("sm_100a", 1): {
            1: "_late_front_prims_ts",
            2: "_late_front_prims_ts",
            3: "_late_front_prims_ts",
            4: "_late_front_prims_ts",
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

    def _serial(self, step: Step, at: SimpleNamespace) -> None:
        """Rows 1 (q 1) on sm_90a.

        main  packed_gemm mla_query index_front index_scores topk_select sparse_decode mla_value o_proj
        """
        self.packed_gemm(step.hidden, at.projected)  # dsa_tp.yaml:89
        self.mla_query(
            at.q_a, at.kv_a, step.slots, self.latent_kv, query=at.query, q_c=at.q_c, writes_q_c=True
        )  # :89
        self.index_front(
            at.wk,
            at.wv,
            step.index_slots,
            self.index_kv,
            at.index_q8,
            at.index_w,
            q_c=at.q_c,
            normalized=True,
        )  # :89
        self.index_scores(
            at.index_q8, at.index_w, self.index_kv, step.index_table, step.lengths, at.scores
        )  # :89
        self.topk_select(
            at.scores, step.lengths, step.block_table, self.latent_kv, at.selected, at.valid
        )  # :89
        # :89
        self.sparse_decode(self.latent_kv, at.selected, at.valid, query=at.query, latent=at.latent)
        self.mla_value(at.latent, at.gate, step.lengths, at.gated)  # :89
        self.o_proj(at.gated, out=step.out)  # :89

    def _front(self, step: Step, at: SimpleNamespace) -> None:
        """Rows 2 (q 1) on sm_90a.

        main  packed_gemm index_front index_scores topk_select sparse_decode mla_value o_proj
        side              mla_query .........................../
        """
        main, side = self.main, self.side
        self.packed_gemm(step.hidden, at.projected)  # dsa_tp.yaml:97
        side.wait_stream(main)
        self.index_front(
            at.wk, at.wv, step.index_slots, self.index_kv, at.index_q8, at.index_w, q_a=at.q_a
        )  # :97
        self.index_scores(
            at.index_q8, at.index_w, self.index_kv, step.index_table, step.lengths, at.scores
        )  # :97
        self.topk_select(
            at.scores, step.lengths, step.block_table, self.latent_kv, at.selected, at.valid
        )  # :97
        with self.on(side):
            self.mla_query(at.q_a, at.kv_a, step.slots, self.latent_kv, query=at.query)  # :98
        main.wait_stream(side)  # sparse_decode needs what side made
        # :97
        self.sparse_decode(self.latent_kv, at.selected, at.valid, query=at.query, latent=at.latent)
        self.mla_value(at.latent, at.gate, step.lengths, at.gated)  # :97
        self.o_proj(at.gated, out=step.out)  # :97

    def _wait(self, step: Step, at: SimpleNamespace) -> None:
        """Rows 3 (q 1) and 4 (q 4) on sm_90a.

        main  packed_gemm mla_query index_gemm dsa_index index_scores topk_select sparse_decode mla_value o_proj
        """
        self.packed_gemm(step.hidden, at.projected)  # dsa_tp.yaml:100
        self.mla_query(
            at.q_a, at.kv_a, step.slots, self.latent_kv, query=at.query, q_c=at.q_c, writes_q_c=True
        )  # :100
        self.index_gemm(at.q_c, at.index_q)  # :100
        self.dsa_index(
            at.index_q, at.wk, at.wv, step.index_slots, self.index_kv, at.index_q8, at.index_w
        )  # :100
        self.index_scores(
            at.index_q8, at.index_w, self.index_kv, step.index_table, step.lengths, at.scores
        )  # :100
        self.topk_select(
            at.scores, step.lengths, step.block_table, self.latent_kv, at.selected, at.valid
        )  # :100
        # :100
        self.sparse_decode(self.latent_kv, at.selected, at.valid, query=at.query, latent=at.latent)
        self.mla_value(at.latent, at.gate, step.lengths, at.gated)  # :100
        self.o_proj(at.gated, out=step.out)  # :100

    def _late_front_sparse_decode(self, step: Step, at: SimpleNamespace) -> None:
        """Rows 4 (q 1) and 8 (q 4) on sm_90a.

        main  packed_gemm index_front index_scores topk_select mla_query sparse_decode mla_value o_proj
        """
        self.packed_gemm(step.hidden, at.projected)  # dsa_tp.yaml:105
        self.index_front(
            at.wk, at.wv, step.index_slots, self.index_kv, at.index_q8, at.index_w, q_a=at.q_a
        )  # :105
        self.index_scores(
            at.index_q8, at.index_w, self.index_kv, step.index_table, step.lengths, at.scores
        )  # :105
        self.topk_select(
            at.scores, step.lengths, step.block_table, self.latent_kv, at.selected, at.valid
        )  # :105
        self.mla_query(at.q_a, at.kv_a, step.slots, self.latent_kv, query=at.query)  # :105
        # :105
        self.sparse_decode(self.latent_kv, at.selected, at.valid, query=at.query, latent=at.latent)
        self.mla_value(at.latent, at.gate, step.lengths, at.gated)  # :105
        self.o_proj(at.gated, out=step.out)  # :105

    def _late_front_prims_ts(self, step: Step, at: SimpleNamespace) -> None:
        """Rows 1-4 (q 1) on sm_100a.

        main  packed_gemm index_front index_scores topk_select mla_query prims_ts mla_value o_proj
        """
        self.packed_gemm(step.hidden, at.projected)  # dsa_tp.yaml:105
        self.index_front(
            at.wk, at.wv, step.index_slots, self.index_kv, at.index_q8, at.index_w, q_a=at.q_a
        )  # :105
        self.index_scores(
            at.index_q8, at.index_w, self.index_kv, step.index_table, step.lengths, at.scores
        )  # :105
        self.topk_select(
            at.scores, step.lengths, step.block_table, self.latent_kv, at.selected, at.valid
        )  # :105
        self.mla_query(at.q_a, at.kv_a, step.slots, self.latent_kv, query=at.query)  # :105
        self.prims_ts(
            self.latent_kv, at.selected, at.valid, query=at.query, latent=at.latent, pdl=False
        )  # :105 plain: reads `selected`, `query` before its wait
        self.mla_value(at.latent, at.gate, step.lengths, at.gated)  # :105
        self.o_proj(at.gated, out=step.out)  # :105

    def _late(self, step: Step, at: SimpleNamespace) -> None:
        """Rows 5 (q 1) and 16 (q 4) on sm_90a.

        main  packed_gemm query_norm index_gemm dsa_index index_scores topk_select mla_query sparse_decode mla_value o_proj
        """
        self.packed_gemm(step.hidden, at.projected)  # dsa_tp.yaml:102
        self.query_norm(at.q_a, at.q_c)  # :102
        self.index_gemm(at.q_c, at.index_q)  # :102
        self.dsa_index(
            at.index_q, at.wk, at.wv, step.index_slots, self.index_kv, at.index_q8, at.index_w
        )  # :102
        self.index_scores(
            at.index_q8, at.index_w, self.index_kv, step.index_table, step.lengths, at.scores
        )  # :102
        self.topk_select(
            at.scores, step.lengths, step.block_table, self.latent_kv, at.selected, at.valid
        )  # :102
        self.mla_query(at.q_a, at.kv_a, step.slots, self.latent_kv, query=at.query)  # :102
        # :102
        self.sparse_decode(self.latent_kv, at.selected, at.valid, query=at.query, latent=at.latent)
        self.mla_value(at.latent, at.gate, step.lengths, at.gated)  # :102
        self.o_proj(at.gated, out=step.out)  # :102

    def _fork_sparse_decode(self, step: Step, at: SimpleNamespace) -> None:
        """Rows 6-8, 16, 32 (q 1) and 32 (q 4) on sm_90a.

        main  packed_gemm query_norm index_gemm dsa_index index_scores topk_select sparse_decode mla_value o_proj
        side              mla_query .............................................../
        """
        main, side = self.main, self.side
        self.packed_gemm(step.hidden, at.projected)  # dsa_tp.yaml:91
        side.wait_stream(main)
        self.query_norm(at.q_a, at.q_c)  # :91
        self.index_gemm(at.q_c, at.index_q)  # :91
        self.dsa_index(
            at.index_q, at.wk, at.wv, step.index_slots, self.index_kv, at.index_q8, at.index_w
        )  # :91
        self.index_scores(
            at.index_q8, at.index_w, self.index_kv, step.index_table, step.lengths, at.scores
        )  # :91
        self.topk_select(
            at.scores, step.lengths, step.block_table, self.latent_kv, at.selected, at.valid
        )  # :91
        with self.on(side):
            self.mla_query(at.q_a, at.kv_a, step.slots, self.latent_kv, query=at.query)  # :92
        main.wait_stream(side)  # sparse_decode needs what side made
        # :91
        self.sparse_decode(self.latent_kv, at.selected, at.valid, query=at.query, latent=at.latent)
        self.mla_value(at.latent, at.gate, step.lengths, at.gated)  # :91
        self.o_proj(at.gated, out=step.out)  # :91

    def _fork_prims_ts(self, step: Step, at: SimpleNamespace) -> None:
        """Rows 5-8 (q 1) and 4, 8 (q 4) on sm_100a.

        main  packed_gemm query_norm index_gemm dsa_index index_scores topk_select prims_ts mla_value o_proj
        side              mla_query .............................................../
        """
        main, side = self.main, self.side
        self.packed_gemm(step.hidden, at.projected)  # dsa_tp.yaml:91
        side.wait_stream(main)
        self.query_norm(at.q_a, at.q_c)  # :91
        self.index_gemm(at.q_c, at.index_q)  # :91
        self.dsa_index(
            at.index_q, at.wk, at.wv, step.index_slots, self.index_kv, at.index_q8, at.index_w
        )  # :91
        self.index_scores(
            at.index_q8, at.index_w, self.index_kv, step.index_table, step.lengths, at.scores
        )  # :91
        self.topk_select(
            at.scores, step.lengths, step.block_table, self.latent_kv, at.selected, at.valid
        )  # :91
        with self.on(side):
            self.mla_query(at.q_a, at.kv_a, step.slots, self.latent_kv, query=at.query)  # :92
        main.wait_stream(side)  # prims_ts needs what side made
        self.prims_ts(
            self.latent_kv, at.selected, at.valid, query=at.query, latent=at.latent, pdl=False
        )  # :91 plain: reads `selected`, `query` before its wait
        self.mla_value(at.latent, at.gate, step.lengths, at.gated)  # :91
        self.o_proj(at.gated, out=step.out)  # :91

    def _fork_trtllm_gen(self, step: Step, at: SimpleNamespace) -> None:
        """Rows 16, 32 (q 1) and 16, 32 (q 4) on sm_100a.

        main  packed_gemm query_norm index_gemm dsa_index index_scores topk_select trtllm_gen mla_value o_proj
        side              mla_query .............................................../
        """
        main, side = self.main, self.side
        self.packed_gemm(step.hidden, at.projected)  # dsa_tp.yaml:91
        side.wait_stream(main)
        self.query_norm(at.q_a, at.q_c)  # :91
        self.index_gemm(at.q_c, at.index_q)  # :91
        self.dsa_index(
            at.index_q, at.wk, at.wv, step.index_slots, self.index_kv, at.index_q8, at.index_w
        )  # :91
        self.index_scores(
            at.index_q8, at.index_w, self.index_kv, step.index_table, step.lengths, at.scores
        )  # :91
        self.topk_select(
            at.scores, step.lengths, step.block_table, self.latent_kv, at.selected, at.valid
        )  # :91
        with self.on(side):
            self.mla_query(at.q_a, at.kv_a, step.slots, self.latent_kv, query=at.query)  # :92
        main.wait_stream(side)  # trtllm_gen needs what side made
        self.trtllm_gen(
            self.latent_kv, at.selected, at.valid, query=at.query, latent=at.latent, pdl=False
        )  # :91 plain: reads `valid` before its wait
        self.mla_value(at.latent, at.gate, step.lengths, at.gated)  # :91
        self.o_proj(at.gated, out=step.out)  # :91

    def _fork_split_sparse_decode_mla_value(self, step: Step, at: SimpleNamespace) -> None:
        """Rows 64 (q 1) and 64 (q 4) on sm_90a.

        main  packed_gemm query_norm index_gemm dsa_index index_scores topk_select sparse_decode mla_value o_proj
        side                         mla_query_split ............................../
        """
        main, side = self.main, self.side
        self.packed_gemm(step.hidden, at.projected)  # dsa_tp.yaml:94
        self.query_norm(at.q_a, at.q_c)  # :94
        side.wait_stream(main)
        self.index_gemm(at.q_c, at.index_q)  # :94
        self.dsa_index(
            at.index_q, at.wk, at.wv, step.index_slots, self.index_kv, at.index_q8, at.index_w
        )  # :94
        self.index_scores(
            at.index_q8, at.index_w, self.index_kv, step.index_table, step.lengths, at.scores
        )  # :94
        self.topk_select(
            at.scores, step.lengths, step.block_table, self.latent_kv, at.selected, at.valid
        )  # :94
        with self.on(side):
            self.mla_query_split(at.q_c, at.kv_a, step.slots, self.latent_kv, query=at.query)  # :95
        main.wait_stream(side)  # sparse_decode needs what side made
        # :94
        self.sparse_decode(self.latent_kv, at.selected, at.valid, query=at.query, latent=at.latent)
        self.mla_value(at.latent, at.gate, step.lengths, at.gated)  # :94
        self.o_proj(at.gated, out=step.out)  # :94

    def _fork_split_trtllm_gen_value_bmm_mla_gate(self, step: Step, at: SimpleNamespace) -> None:
        """Rows 64 (q 1) and 64 (q 4) on sm_100a.

        main  packed_gemm query_norm index_gemm dsa_index index_scores topk_select trtllm_gen value_bmm mla_gate o_proj
        side                         mla_query_split ............................../
        """
        main, side = self.main, self.side
        self.packed_gemm(step.hidden, at.projected)  # dsa_tp.yaml:94
        self.query_norm(at.q_a, at.q_c)  # :94
        side.wait_stream(main)
        self.index_gemm(at.q_c, at.index_q)  # :94
        self.dsa_index(
            at.index_q, at.wk, at.wv, step.index_slots, self.index_kv, at.index_q8, at.index_w
        )  # :94
        self.index_scores(
            at.index_q8, at.index_w, self.index_kv, step.index_table, step.lengths, at.scores
        )  # :94
        self.topk_select(
            at.scores, step.lengths, step.block_table, self.latent_kv, at.selected, at.valid
        )  # :94
        with self.on(side):
            self.mla_query_split(at.q_c, at.kv_a, step.slots, self.latent_kv, query=at.query)  # :95
        main.wait_stream(side)  # trtllm_gen needs what side made
        self.trtllm_gen(
            self.latent_kv, at.selected, at.valid, query=at.query, latent=at.latent, pdl=False
        )  # :94 plain: reads `valid` before its wait
        self.value_bmm(at.latent, at.values, pdl=False)  # :94 plain: it never waits
        self.mla_gate(at.values, at.gate, step.lengths, at.gated)  # :94
        self.o_proj(at.gated, out=step.out)  # :94
