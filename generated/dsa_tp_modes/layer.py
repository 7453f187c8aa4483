"""dsa_tp with every mode in its table, for holding the modes against one another on a GPU; not for serving.

Generated from pipelines/dsa_tp_modes.yaml; do not edit. Schedule proved.

    arch     q  rows    method
    sm_90a   1  1       _serial
    sm_90a   1  2       _front
    sm_90a   1  3       _wait
    sm_90a   1  4       _late_front_sparse_decode
    sm_90a   1  5       _late
    sm_90a   1  6       _apart_front
    sm_90a   1  7       _apart_late
    sm_90a   1  8       _apart_fork
    sm_90a   1  16, 32  _fork_sparse_decode
    sm_90a   1  64      _fork_split_sparse_decode_mla_value
    sm_90a   4  4       _wait
    sm_90a   4  8       _late_front_sparse_decode
    sm_90a   4  16      _late
    sm_90a   4  32      _fork_sparse_decode
    sm_90a   4  64      _fork_split_sparse_decode_mla_value
    sm_100a  1  1-4     _late_front_prims_ts
    sm_100a  1  5-8     _fork_prims_ts
    sm_100a  1  16, 32  _fork_trtllm_gen
    sm_100a  1  64      _fork_split_trtllm_gen_value_bmm_mla_gate
    sm_100a  4  4, 8    _fork_prims_ts
    sm_100a  4  16, 32  _fork_trtllm_gen
    sm_100a  4  64      _fork_split_trtllm_gen_value_bmm_mla_gate
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
    STREAMS = {"side": 0, "gates": 0}
    TABLE = {
        ("sm_90a", 1): {
            1: "_serial",
            2: "_front",
            3: "_wait",
            4: "_late_front_sparse_decode",
            5: "_late",
            6: "_apart_front",
            7: "_apart_late",
            8: "_apart_fork",
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
        self.packed_gemm(step.hidden, at.projected)  # dsa_tp.yaml:131
        self.mla_query(
            at.q_a, at.kv_a, step.slots, self.latent_kv, query=at.query, q_c=at.q_c, writes_q_c=True
        )  # :131
        self.index_front(
            at.wk,
            at.wv,
            step.index_slots,
            self.index_kv,
            at.index_q8,
            at.index_w,
            q_c=at.q_c,
            normalized=True,
        )  # :131
        self.index_scores(
            at.index_q8, at.index_w, self.index_kv, step.index_table, step.lengths, at.scores
        )  # :131
        self.topk_select(
            at.scores, step.lengths, step.block_table, self.latent_kv, at.selected, at.valid
        )  # :131
        # :131
        self.sparse_decode(self.latent_kv, at.selected, at.valid, query=at.query, latent=at.latent)
        self.mla_value(at.latent, at.gate, step.lengths, at.gated)  # :131
        self.o_proj(at.gated, out=step.out)  # :131

    def _front(self, step: Step, at: SimpleNamespace) -> None:
        """Rows 2 (q 1) on sm_90a.

        main  packed_gemm index_front index_scores topk_select sparse_decode mla_value o_proj
        side              mla_query .........................../
        """
        main, side = self.main, self.side
        self.packed_gemm(step.hidden, at.projected)  # dsa_tp.yaml:139
        side.wait_stream(main)
        self.index_front(
            at.wk, at.wv, step.index_slots, self.index_kv, at.index_q8, at.index_w, q_a=at.q_a
        )  # :139
        self.index_scores(
            at.index_q8, at.index_w, self.index_kv, step.index_table, step.lengths, at.scores
        )  # :139
        self.topk_select(
            at.scores, step.lengths, step.block_table, self.latent_kv, at.selected, at.valid
        )  # :139
        with self.on(side):
            self.mla_query(at.q_a, at.kv_a, step.slots, self.latent_kv, query=at.query)  # :140
        main.wait_stream(side)  # sparse_decode needs what side made
        # :139
        self.sparse_decode(self.latent_kv, at.selected, at.valid, query=at.query, latent=at.latent)
        self.mla_value(at.latent, at.gate, step.lengths, at.gated)  # :139
        self.o_proj(at.gated, out=step.out)  # :139

    def _wait(self, step: Step, at: SimpleNamespace) -> None:
        """Rows 3 (q 1) and 4 (q 4) on sm_90a.

        main  packed_gemm mla_query index_gemm dsa_index index_scores topk_select sparse_decode mla_value o_proj
        """
        self.packed_gemm(step.hidden, at.projected)  # dsa_tp.yaml:142
        self.mla_query(
            at.q_a, at.kv_a, step.slots, self.latent_kv, query=at.query, q_c=at.q_c, writes_q_c=True
        )  # :142
        self.index_gemm(at.q_c, at.index_q)  # :142
        self.dsa_index(
            at.index_q, at.wk, at.wv, step.index_slots, self.index_kv, at.index_q8, at.index_w
        )  # :142
        self.index_scores(
            at.index_q8, at.index_w, self.index_kv, step.index_table, step.lengths, at.scores
        )  # :142
        self.topk_select(
            at.scores, step.lengths, step.block_table, self.latent_kv, at.selected, at.valid
        )  # :142
        # :142
        self.sparse_decode(self.latent_kv, at.selected, at.valid, query=at.query, latent=at.latent)
        self.mla_value(at.latent, at.gate, step.lengths, at.gated)  # :142
        self.o_proj(at.gated, out=step.out)  # :142

    def _late_front_sparse_decode(self, step: Step, at: SimpleNamespace) -> None:
        """Rows 4 (q 1) and 8 (q 4) on sm_90a.

        main  packed_gemm index_front index_scores topk_select mla_query sparse_decode mla_value o_proj
        """
        self.packed_gemm(step.hidden, at.projected)  # dsa_tp.yaml:147
        self.index_front(
            at.wk, at.wv, step.index_slots, self.index_kv, at.index_q8, at.index_w, q_a=at.q_a
        )  # :147
        self.index_scores(
            at.index_q8, at.index_w, self.index_kv, step.index_table, step.lengths, at.scores
        )  # :147
        self.topk_select(
            at.scores, step.lengths, step.block_table, self.latent_kv, at.selected, at.valid
        )  # :147
        self.mla_query(at.q_a, at.kv_a, step.slots, self.latent_kv, query=at.query)  # :147
        # :147
        self.sparse_decode(self.latent_kv, at.selected, at.valid, query=at.query, latent=at.latent)
        self.mla_value(at.latent, at.gate, step.lengths, at.gated)  # :147
        self.o_proj(at.gated, out=step.out)  # :147

    def _late_front_prims_ts(self, step: Step, at: SimpleNamespace) -> None:
        """Rows 1-4 (q 1) on sm_100a.

        main  packed_gemm index_front index_scores topk_select mla_query prims_ts mla_value o_proj
        """
        self.packed_gemm(step.hidden, at.projected)  # dsa_tp.yaml:147
        self.index_front(
            at.wk, at.wv, step.index_slots, self.index_kv, at.index_q8, at.index_w, q_a=at.q_a
        )  # :147
        self.index_scores(
            at.index_q8, at.index_w, self.index_kv, step.index_table, step.lengths, at.scores
        )  # :147
        self.topk_select(
            at.scores, step.lengths, step.block_table, self.latent_kv, at.selected, at.valid
        )  # :147
        self.mla_query(at.q_a, at.kv_a, step.slots, self.latent_kv, query=at.query)  # :147
        self.prims_ts(
            self.latent_kv, at.selected, at.valid, query=at.query, latent=at.latent, pdl=False
        )  # :147 plain: reads `selected`, `query` before its wait
        self.mla_value(at.latent, at.gate, step.lengths, at.gated)  # :147
        self.o_proj(at.gated, out=step.out)  # :147

    def _late(self, step: Step, at: SimpleNamespace) -> None:
        """Rows 5 (q 1) and 16 (q 4) on sm_90a.

        main  packed_gemm query_norm index_gemm dsa_index index_scores topk_select mla_query sparse_decode mla_value o_proj
        """
        self.packed_gemm(step.hidden, at.projected)  # dsa_tp.yaml:144
        self.query_norm(at.q_a, at.q_c)  # :144
        self.index_gemm(at.q_c, at.index_q)  # :144
        self.dsa_index(
            at.index_q, at.wk, at.wv, step.index_slots, self.index_kv, at.index_q8, at.index_w
        )  # :144
        self.index_scores(
            at.index_q8, at.index_w, self.index_kv, step.index_table, step.lengths, at.scores
        )  # :144
        self.topk_select(
            at.scores, step.lengths, step.block_table, self.latent_kv, at.selected, at.valid
        )  # :144
        self.mla_query(at.q_a, at.kv_a, step.slots, self.latent_kv, query=at.query)  # :144
        # :144
        self.sparse_decode(self.latent_kv, at.selected, at.valid, query=at.query, latent=at.latent)
        self.mla_value(at.latent, at.gate, step.lengths, at.gated)  # :144
        self.o_proj(at.gated, out=step.out)  # :144

    def _apart_front(self, step: Step, at: SimpleNamespace) -> None:
        """Rows 6 (q 1) on sm_90a.

        main   packed_gemm index_front index_scores topk_select sparse_decode mla_value o_proj
        side               mla_query .........................../
        gates                                                   gate_gemm ..../
        """
        main, side, gates = self.main, self.side, self.gates
        self.packed_gemm(step.hidden, at.projected, without_gate=True)  # dsa_tp.yaml:153
        side.wait_stream(main)
        self.index_front(
            at.wk, at.wv, step.index_slots, self.index_kv, at.index_q8, at.index_w, q_a=at.q_a
        )  # :153
        self.index_scores(
            at.index_q8, at.index_w, self.index_kv, step.index_table, step.lengths, at.scores
        )  # :153
        self.topk_select(
            at.scores, step.lengths, step.block_table, self.latent_kv, at.selected, at.valid
        )  # :153
        gates.wait_stream(main)
        with self.on(side):
            self.mla_query(at.q_a, at.kv_a, step.slots, self.latent_kv, query=at.query)  # :154
        main.wait_stream(side)  # sparse_decode needs what side made
        # :153
        self.sparse_decode(self.latent_kv, at.selected, at.valid, query=at.query, latent=at.latent)
        with self.on(gates):
            self.gate_gemm(step.hidden, at.gate)  # :155
        main.wait_stream(gates)  # mla_value needs what gates made
        self.mla_value(at.latent, at.gate, step.lengths, at.gated)  # :153
        self.o_proj(at.gated, out=step.out)  # :153

    def _apart_late(self, step: Step, at: SimpleNamespace) -> None:
        """Rows 7 (q 1) on sm_90a.

        main   packed_gemm index_front index_scores topk_select sparse_decode mla_value o_proj
        side                                        mla_query ../
        gates                                                   gate_gemm ..../
        """
        main, side, gates = self.main, self.side, self.gates
        self.packed_gemm(step.hidden, at.projected, without_gate=True)  # dsa_tp.yaml:157
        self.index_front(
            at.wk, at.wv, step.index_slots, self.index_kv, at.index_q8, at.index_w, q_a=at.q_a
        )  # :157
        self.index_scores(
            at.index_q8, at.index_w, self.index_kv, step.index_table, step.lengths, at.scores
        )  # :157
        side.wait_stream(main)
        self.topk_select(
            at.scores, step.lengths, step.block_table, self.latent_kv, at.selected, at.valid
        )  # :157
        gates.wait_stream(main)
        with self.on(side):
            self.mla_query(at.q_a, at.kv_a, step.slots, self.latent_kv, query=at.query)  # :158
        main.wait_stream(side)  # sparse_decode needs what side made
        # :157
        self.sparse_decode(self.latent_kv, at.selected, at.valid, query=at.query, latent=at.latent)
        with self.on(gates):
            self.gate_gemm(step.hidden, at.gate)  # :159
        main.wait_stream(gates)  # mla_value needs what gates made
        self.mla_value(at.latent, at.gate, step.lengths, at.gated)  # :157
        self.o_proj(at.gated, out=step.out)  # :157

    def _apart_fork(self, step: Step, at: SimpleNamespace) -> None:
        """Rows 8 (q 1) on sm_90a.

        main   packed_gemm query_norm index_gemm dsa_index index_scores topk_select sparse_decode mla_value o_proj
        side               mla_query .............................................../
        gates                                                           gate_gemm ................/
        """
        main, side, gates = self.main, self.side, self.gates
        self.packed_gemm(step.hidden, at.projected, without_gate=True)  # dsa_tp.yaml:161
        side.wait_stream(main)
        self.query_norm(at.q_a, at.q_c)  # :161
        self.index_gemm(at.q_c, at.index_q)  # :161
        self.dsa_index(
            at.index_q, at.wk, at.wv, step.index_slots, self.index_kv, at.index_q8, at.index_w
        )  # :161
        self.index_scores(
            at.index_q8, at.index_w, self.index_kv, step.index_table, step.lengths, at.scores
        )  # :161
        gates.wait_stream(main)
        self.topk_select(
            at.scores, step.lengths, step.block_table, self.latent_kv, at.selected, at.valid
        )  # :161
        with self.on(side):
            self.mla_query(at.q_a, at.kv_a, step.slots, self.latent_kv, query=at.query)  # :163
        main.wait_stream(side)  # sparse_decode needs what side made
        # :161
        self.sparse_decode(self.latent_kv, at.selected, at.valid, query=at.query, latent=at.latent)
        with self.on(gates):
            self.gate_gemm(step.hidden, at.gate)  # :164
        main.wait_stream(gates)  # mla_value needs what gates made
        self.mla_value(at.latent, at.gate, step.lengths, at.gated)  # :162
        self.o_proj(at.gated, out=step.out)  # :162

    def _fork_sparse_decode(self, step: Step, at: SimpleNamespace) -> None:
        """Rows 16, 32 (q 1) and 32 (q 4) on sm_90a.

        main  packed_gemm query_norm index_gemm dsa_index index_scores topk_select sparse_decode mla_value o_proj
        side              mla_query .............................................../
        """
        main, side = self.main, self.side
        self.packed_gemm(step.hidden, at.projected)  # dsa_tp.yaml:133
        side.wait_stream(main)
        self.query_norm(at.q_a, at.q_c)  # :133
        self.index_gemm(at.q_c, at.index_q)  # :133
        self.dsa_index(
            at.index_q, at.wk, at.wv, step.index_slots, self.index_kv, at.index_q8, at.index_w
        )  # :133
        self.index_scores(
            at.index_q8, at.index_w, self.index_kv, step.index_table, step.lengths, at.scores
        )  # :133
        self.topk_select(
            at.scores, step.lengths, step.block_table, self.latent_kv, at.selected, at.valid
        )  # :133
        with self.on(side):
            self.mla_query(at.q_a, at.kv_a, step.slots, self.latent_kv, query=at.query)  # :134
        main.wait_stream(side)  # sparse_decode needs what side made
        # :133
        self.sparse_decode(self.latent_kv, at.selected, at.valid, query=at.query, latent=at.latent)
        self.mla_value(at.latent, at.gate, step.lengths, at.gated)  # :133
        self.o_proj(at.gated, out=step.out)  # :133

    def _fork_prims_ts(self, step: Step, at: SimpleNamespace) -> None:
        """Rows 5-8 (q 1) and 4, 8 (q 4) on sm_100a.

        main  packed_gemm query_norm index_gemm dsa_index index_scores topk_select prims_ts mla_value o_proj
        side              mla_query .............................................../
        """
        main, side = self.main, self.side
        self.packed_gemm(step.hidden, at.projected)  # dsa_tp.yaml:133
        side.wait_stream(main)
        self.query_norm(at.q_a, at.q_c)  # :133
        self.index_gemm(at.q_c, at.index_q)  # :133
        self.dsa_index(
            at.index_q, at.wk, at.wv, step.index_slots, self.index_kv, at.index_q8, at.index_w
        )  # :133
        self.index_scores(
            at.index_q8, at.index_w, self.index_kv, step.index_table, step.lengths, at.scores
        )  # :133
        self.topk_select(
            at.scores, step.lengths, step.block_table, self.latent_kv, at.selected, at.valid
        )  # :133
        with self.on(side):
            self.mla_query(at.q_a, at.kv_a, step.slots, self.latent_kv, query=at.query)  # :134
        main.wait_stream(side)  # prims_ts needs what side made
        self.prims_ts(
            self.latent_kv, at.selected, at.valid, query=at.query, latent=at.latent, pdl=False
        )  # :133 plain: reads `selected`, `query` before its wait
        self.mla_value(at.latent, at.gate, step.lengths, at.gated)  # :133
        self.o_proj(at.gated, out=step.out)  # :133

    def _fork_trtllm_gen(self, step: Step, at: SimpleNamespace) -> None:
        """Rows 16, 32 (q 1) and 16, 32 (q 4) on sm_100a.

        main  packed_gemm query_norm index_gemm dsa_index index_scores topk_select trtllm_gen mla_value o_proj
        side              mla_query .............................................../
        """
        main, side = self.main, self.side
        self.packed_gemm(step.hidden, at.projected)  # dsa_tp.yaml:133
        side.wait_stream(main)
        self.query_norm(at.q_a, at.q_c)  # :133
        self.index_gemm(at.q_c, at.index_q)  # :133
        self.dsa_index(
            at.index_q, at.wk, at.wv, step.index_slots, self.index_kv, at.index_q8, at.index_w
        )  # :133
        self.index_scores(
            at.index_q8, at.index_w, self.index_kv, step.index_table, step.lengths, at.scores
        )  # :133
        self.topk_select(
            at.scores, step.lengths, step.block_table, self.latent_kv, at.selected, at.valid
        )  # :133
        with self.on(side):
            self.mla_query(at.q_a, at.kv_a, step.slots, self.latent_kv, query=at.query)  # :134
        main.wait_stream(side)  # trtllm_gen needs what side made
        self.trtllm_gen(
            self.latent_kv, at.selected, at.valid, query=at.query, latent=at.latent, pdl=False
        )  # :133 plain: reads `valid` before its wait
        self.mla_value(at.latent, at.gate, step.lengths, at.gated)  # :133
        self.o_proj(at.gated, out=step.out)  # :133

    def _fork_split_sparse_decode_mla_value(self, step: Step, at: SimpleNamespace) -> None:
        """Rows 64 (q 1) and 64 (q 4) on sm_90a.

        main  packed_gemm query_norm index_gemm dsa_index index_scores topk_select sparse_decode mla_value o_proj
        side                         mla_query_split ............................../
        """
        main, side = self.main, self.side
        self.packed_gemm(step.hidden, at.projected)  # dsa_tp.yaml:136
        self.query_norm(at.q_a, at.q_c)  # :136
        side.wait_stream(main)
        self.index_gemm(at.q_c, at.index_q)  # :136
        self.dsa_index(
            at.index_q, at.wk, at.wv, step.index_slots, self.index_kv, at.index_q8, at.index_w
        )  # :136
        self.index_scores(
            at.index_q8, at.index_w, self.index_kv, step.index_table, step.lengths, at.scores
        )  # :136
        self.topk_select(
            at.scores, step.lengths, step.block_table, self.latent_kv, at.selected, at.valid
        )  # :136
        with self.on(side):
            # :137
            self.mla_query_split(at.q_c, at.kv_a, step.slots, self.latent_kv, query=at.query)
        main.wait_stream(side)  # sparse_decode needs what side made
        # :136
        self.sparse_decode(self.latent_kv, at.selected, at.valid, query=at.query, latent=at.latent)
        self.mla_value(at.latent, at.gate, step.lengths, at.gated)  # :136
        self.o_proj(at.gated, out=step.out)  # :136

    def _fork_split_trtllm_gen_value_bmm_mla_gate(self, step: Step, at: SimpleNamespace) -> None:
        """Rows 64 (q 1) and 64 (q 4) on sm_100a.

        main  packed_gemm query_norm index_gemm dsa_index index_scores topk_select trtllm_gen value_bmm mla_gate o_proj
        side                         mla_query_split ............................../
        """
        main, side = self.main, self.side
        self.packed_gemm(step.hidden, at.projected)  # dsa_tp.yaml:136
        self.query_norm(at.q_a, at.q_c)  # :136
        side.wait_stream(main)
        self.index_gemm(at.q_c, at.index_q)  # :136
        self.dsa_index(
            at.index_q, at.wk, at.wv, step.index_slots, self.index_kv, at.index_q8, at.index_w
        )  # :136
        self.index_scores(
            at.index_q8, at.index_w, self.index_kv, step.index_table, step.lengths, at.scores
        )  # :136
        self.topk_select(
            at.scores, step.lengths, step.block_table, self.latent_kv, at.selected, at.valid
        )  # :136
        with self.on(side):
            # :137
            self.mla_query_split(at.q_c, at.kv_a, step.slots, self.latent_kv, query=at.query)
        main.wait_stream(side)  # trtllm_gen needs what side made
        self.trtllm_gen(
            self.latent_kv, at.selected, at.valid, query=at.query, latent=at.latent, pdl=False
        )  # :136 plain: reads `valid` before its wait
        self.value_bmm(at.latent, at.values, pdl=False)  # :136 plain: it never waits
        self.mla_gate(at.values, at.gate, step.lengths, at.gated)  # :136
        self.o_proj(at.gated, out=step.out)  # :136
