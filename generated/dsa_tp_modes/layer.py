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
        self.packed_gemm(step.hidden, at.projected)  # dsa_tp.yaml:121
        self.mla_query(
            at.q_a, at.kv_a, step.slots, self.latent_kv, query=at.query, q_c=at.q_c, writes_q_c=True
        )  # :121
        self.index_front(
            at.wk,
            at.wv,
            step.index_slots,
            self.index_kv,
            at.index_q8,
            at.index_w,
            q_c=at.q_c,
            normalized=True,
        )  # :121
        self.index_scores(
            at.index_q8, at.index_w, self.index_kv, step.index_table, step.lengths, at.scores
        )  # :121
        self.topk_select(
            at.scores, step.lengths, step.block_table, self.latent_kv, at.selected, at.valid
        )  # :121
        # :121
        self.sparse_decode(self.latent_kv, at.selected, at.valid, query=at.query, latent=at.latent)
        self.mla_value(at.latent, at.gate, step.lengths, at.gated)  # :121
        self.o_proj(at.gated, out=step.out)  # :121

    def _front(self, step: Step, at: SimpleNamespace) -> None:
        """Rows 2 (q 1) on sm_90a.

        main  packed_gemm index_front index_scores topk_select sparse_decode mla_value o_proj
        side              mla_query .........................../
        """
        main, side = self.main, self.side
        self.packed_gemm(step.hidden, at.projected)  # dsa_tp.yaml:129
        side.wait_stream(main)
        self.index_front(
            at.wk, at.wv, step.index_slots, self.index_kv, at.index_q8, at.index_w, q_a=at.q_a
        )  # :129
        self.index_scores(
            at.index_q8, at.index_w, self.index_kv, step.index_table, step.lengths, at.scores
        )  # :129
        self.topk_select(
            at.scores, step.lengths, step.block_table, self.latent_kv, at.selected, at.valid
        )  # :129
        with self.on(side):
            self.mla_query(at.q_a, at.kv_a, step.slots, self.latent_kv, query=at.query)  # :130
        main.wait_stream(side)  # sparse_decode needs what side made
        # :129
        self.sparse_decode(self.latent_kv, at.selected, at.valid, query=at.query, latent=at.latent)
        self.mla_value(at.latent, at.gate, step.lengths, at.gated)  # :129
        self.o_proj(at.gated, out=step.out)  # :129

    def _wait(self, step: Step, at: SimpleNamespace) -> None:
        """Rows 3 (q 1) and 4 (q 4) on sm_90a.

        main  packed_gemm mla_query index_gemm dsa_index index_scores topk_select sparse_decode mla_value o_proj
        """
        self.packed_gemm(step.hidden, at.projected)  # dsa_tp.yaml:132
        self.mla_query(
            at.q_a, at.kv_a, step.slots, self.latent_kv, query=at.query, q_c=at.q_c, writes_q_c=True
        )  # :132
        self.index_gemm(at.q_c, at.index_q)  # :132
        self.dsa_index(
            at.index_q, at.wk, at.wv, step.index_slots, self.index_kv, at.index_q8, at.index_w
        )  # :132
        self.index_scores(
            at.index_q8, at.index_w, self.index_kv, step.index_table, step.lengths, at.scores
        )  # :132
        self.topk_select(
            at.scores, step.lengths, step.block_table, self.latent_kv, at.selected, at.valid
        )  # :132
        # :132
        self.sparse_decode(self.latent_kv, at.selected, at.valid, query=at.query, latent=at.latent)
        self.mla_value(at.latent, at.gate, step.lengths, at.gated)  # :132
        self.o_proj(at.gated, out=step.out)  # :132

    def _late_front_sparse_decode(self, step: Step, at: SimpleNamespace) -> None:
        """Rows 4 (q 1) and 8 (q 4) on sm_90a.

        main  packed_gemm index_front index_scores topk_select mla_query sparse_decode mla_value o_proj
        """
        self.packed_gemm(step.hidden, at.projected)  # dsa_tp.yaml:137
        self.index_front(
            at.wk, at.wv, step.index_slots, self.index_kv, at.index_q8, at.index_w, q_a=at.q_a
        )  # :137
        self.index_scores(
            at.index_q8, at.index_w, self.index_kv, step.index_table, step.lengths, at.scores
        )  # :137
        self.topk_select(
            at.scores, step.lengths, step.block_table, self.latent_kv, at.selected, at.valid
        )  # :137
        self.mla_query(at.q_a, at.kv_a, step.slots, self.latent_kv, query=at.query)  # :137
        # :137
        self.sparse_decode(self.latent_kv, at.selected, at.valid, query=at.query, latent=at.latent)
        self.mla_value(at.latent, at.gate, step.lengths, at.gated)  # :137
        self.o_proj(at.gated, out=step.out)  # :137

    def _late_front_prims_ts(self, step: Step, at: SimpleNamespace) -> None:
        """Rows 1-4 (q 1) on sm_100a.

        main  packed_gemm index_front index_scores topk_select mla_query prims_ts mla_value o_proj
        """
        self.packed_gemm(step.hidden, at.projected)  # dsa_tp.yaml:137
        self.index_front(
            at.wk, at.wv, step.index_slots, self.index_kv, at.index_q8, at.index_w, q_a=at.q_a
        )  # :137
        self.index_scores(
            at.index_q8, at.index_w, self.index_kv, step.index_table, step.lengths, at.scores
        )  # :137
        self.topk_select(
            at.scores, step.lengths, step.block_table, self.latent_kv, at.selected, at.valid
        )  # :137
        self.mla_query(at.q_a, at.kv_a, step.slots, self.latent_kv, query=at.query)  # :137
        self.prims_ts(
            self.latent_kv, at.selected, at.valid, query=at.query, latent=at.latent, pdl=False
        )  # :137 plain: reads `selected`, `query` before its wait
        self.mla_value(at.latent, at.gate, step.lengths, at.gated)  # :137
        self.o_proj(at.gated, out=step.out)  # :137

    def _late(self, step: Step, at: SimpleNamespace) -> None:
        """Rows 5 (q 1) and 16 (q 4) on sm_90a.

        main  packed_gemm query_norm index_gemm dsa_index index_scores topk_select mla_query sparse_decode mla_value o_proj
        """
        self.packed_gemm(step.hidden, at.projected)  # dsa_tp.yaml:134
        self.query_norm(at.q_a, at.q_c)  # :134
        self.index_gemm(at.q_c, at.index_q)  # :134
        self.dsa_index(
            at.index_q, at.wk, at.wv, step.index_slots, self.index_kv, at.index_q8, at.index_w
        )  # :134
        self.index_scores(
            at.index_q8, at.index_w, self.index_kv, step.index_table, step.lengths, at.scores
        )  # :134
        self.topk_select(
            at.scores, step.lengths, step.block_table, self.latent_kv, at.selected, at.valid
        )  # :134
        self.mla_query(at.q_a, at.kv_a, step.slots, self.latent_kv, query=at.query)  # :134
        # :134
        self.sparse_decode(self.latent_kv, at.selected, at.valid, query=at.query, latent=at.latent)
        self.mla_value(at.latent, at.gate, step.lengths, at.gated)  # :134
        self.o_proj(at.gated, out=step.out)  # :134

    def _apart_front(self, step: Step, at: SimpleNamespace) -> None:
        """Rows 6 (q 1) on sm_90a.

        main   packed_gemm index_front index_scores topk_select sparse_decode mla_value o_proj
        side               mla_query .........................../
        gates                                                   gate_gemm ..../
        """
        main, side, gates = self.main, self.side, self.gates
        self.packed_gemm(step.hidden, at.projected, without_gate=True)  # dsa_tp.yaml:143
        side.wait_stream(main)
        self.index_front(
            at.wk, at.wv, step.index_slots, self.index_kv, at.index_q8, at.index_w, q_a=at.q_a
        )  # :143
        self.index_scores(
            at.index_q8, at.index_w, self.index_kv, step.index_table, step.lengths, at.scores
        )  # :143
        self.topk_select(
            at.scores, step.lengths, step.block_table, self.latent_kv, at.selected, at.valid
        )  # :143
        gates.wait_stream(main)
        with self.on(side):
            self.mla_query(at.q_a, at.kv_a, step.slots, self.latent_kv, query=at.query)  # :144
        main.wait_stream(side)  # sparse_decode needs what side made
        # :143
        self.sparse_decode(self.latent_kv, at.selected, at.valid, query=at.query, latent=at.latent)
        with self.on(gates):
            self.gate_gemm(step.hidden, at.gate)  # :145
        main.wait_stream(gates)  # mla_value needs what gates made
        self.mla_value(at.latent, at.gate, step.lengths, at.gated)  # :143
        self.o_proj(at.gated, out=step.out)  # :143

    def _apart_late(self, step: Step, at: SimpleNamespace) -> None:
        """Rows 7 (q 1) on sm_90a.

        main   packed_gemm index_front index_scores topk_select sparse_decode mla_value o_proj
        side                                        mla_query ../
        gates                                                   gate_gemm ..../
        """
        main, side, gates = self.main, self.side, self.gates
        self.packed_gemm(step.hidden, at.projected, without_gate=True)  # dsa_tp.yaml:147
        self.index_front(
            at.wk, at.wv, step.index_slots, self.index_kv, at.index_q8, at.index_w, q_a=at.q_a
        )  # :147
        self.index_scores(
            at.index_q8, at.index_w, self.index_kv, step.index_table, step.lengths, at.scores
        )  # :147
        side.wait_stream(main)
        self.topk_select(
            at.scores, step.lengths, step.block_table, self.latent_kv, at.selected, at.valid
        )  # :147
        gates.wait_stream(main)
        with self.on(side):
            self.mla_query(at.q_a, at.kv_a, step.slots, self.latent_kv, query=at.query)  # :148
        main.wait_stream(side)  # sparse_decode needs what side made
        # :147
        self.sparse_decode(self.latent_kv, at.selected, at.valid, query=at.query, latent=at.latent)
        with self.on(gates):
            self.gate_gemm(step.hidden, at.gate)  # :149
        main.wait_stream(gates)  # mla_value needs what gates made
        self.mla_value(at.latent, at.gate, step.lengths, at.gated)  # :147
        self.o_proj(at.gated, out=step.out)  # :147

    def _apart_fork(self, step: Step, at: SimpleNamespace) -> None:
        """Rows 8 (q 1) on sm_90a.

        main   packed_gemm query_norm index_gemm dsa_index index_scores topk_select sparse_decode mla_value o_proj
        side               mla_query .............................................../
        gates                                                           gate_gemm ................/
        """
        main, side, gates = self.main, self.side, self.gates
        self.packed_gemm(step.hidden, at.projected, without_gate=True)  # dsa_tp.yaml:151
        side.wait_stream(main)
        self.query_norm(at.q_a, at.q_c)  # :151
        self.index_gemm(at.q_c, at.index_q)  # :151
        self.dsa_index(
            at.index_q, at.wk, at.wv, step.index_slots, self.index_kv, at.index_q8, at.index_w
        )  # :151
        self.index_scores(
            at.index_q8, at.index_w, self.index_kv, step.index_table, step.lengths, at.scores
        )  # :151
        gates.wait_stream(main)
        self.topk_select(
            at.scores, step.lengths, step.block_table, self.latent_kv, at.selected, at.valid
        )  # :151
        with self.on(side):
            self.mla_query(at.q_a, at.kv_a, step.slots, self.latent_kv, query=at.query)  # :153
        main.wait_stream(side)  # sparse_decode needs what side made
        # :151
        self.sparse_decode(self.latent_kv, at.selected, at.valid, query=at.query, latent=at.latent)
        with self.on(gates):
            self.gate_gemm(step.hidden, at.gate)  # :154
        main.wait_stream(gates)  # mla_value needs what gates made
        self.mla_value(at.latent, at.gate, step.lengths, at.gated)  # :152
        self.o_proj(at.gated, out=step.out)  # :152

    def _fork_sparse_decode(self, step: Step, at: SimpleNamespace) -> None:
        """Rows 16, 32 (q 1) and 32 (q 4) on sm_90a.

        main  packed_gemm query_norm index_gemm dsa_index index_scores topk_select sparse_decode mla_value o_proj
        side              mla_query .............................................../
        """
        main, side = self.main, self.side
        self.packed_gemm(step.hidden, at.projected)  # dsa_tp.yaml:123
        side.wait_stream(main)
        self.query_norm(at.q_a, at.q_c)  # :123
        self.index_gemm(at.q_c, at.index_q)  # :123
        self.dsa_index(
            at.index_q, at.wk, at.wv, step.index_slots, self.index_kv, at.index_q8, at.index_w
        )  # :123
        self.index_scores(
            at.index_q8, at.index_w, self.index_kv, step.index_table, step.lengths, at.scores
        )  # :123
        self.topk_select(
            at.scores, step.lengths, step.block_table, self.latent_kv, at.selected, at.valid
        )  # :123
        with self.on(side):
            self.mla_query(at.q_a, at.kv_a, step.slots, self.latent_kv, query=at.query)  # :124
        main.wait_stream(side)  # sparse_decode needs what side made
        # :123
        self.sparse_decode(self.latent_kv, at.selected, at.valid, query=at.query, latent=at.latent)
        self.mla_value(at.latent, at.gate, step.lengths, at.gated)  # :123
        self.o_proj(at.gated, out=step.out)  # :123

    def _fork_prims_ts(self, step: Step, at: SimpleNamespace) -> None:
        """Rows 5-8 (q 1) and 4, 8 (q 4) on sm_100a.

        main  packed_gemm query_norm index_gemm dsa_index index_scores topk_select prims_ts mla_value o_proj
        side              mla_query .............................................../
        """
        main, side = self.main, self.side
        self.packed_gemm(step.hidden, at.projected)  # dsa_tp.yaml:123
        side.wait_stream(main)
        self.query_norm(at.q_a, at.q_c)  # :123
        self.index_gemm(at.q_c, at.index_q)  # :123
        self.dsa_index(
            at.index_q, at.wk, at.wv, step.index_slots, self.index_kv, at.index_q8, at.index_w
        )  # :123
        self.index_scores(
            at.index_q8, at.index_w, self.index_kv, step.index_table, step.lengths, at.scores
        )  # :123
        self.topk_select(
            at.scores, step.lengths, step.block_table, self.latent_kv, at.selected, at.valid
        )  # :123
        with self.on(side):
            self.mla_query(at.q_a, at.kv_a, step.slots, self.latent_kv, query=at.query)  # :124
        main.wait_stream(side)  # prims_ts needs what side made
        self.prims_ts(
            self.latent_kv, at.selected, at.valid, query=at.query, latent=at.latent, pdl=False
        )  # :123 plain: reads `selected`, `query` before its wait
        self.mla_value(at.latent, at.gate, step.lengths, at.gated)  # :123
        self.o_proj(at.gated, out=step.out)  # :123

    def _fork_trtllm_gen(self, step: Step, at: SimpleNamespace) -> None:
        """Rows 16, 32 (q 1) and 16, 32 (q 4) on sm_100a.

        main  packed_gemm query_norm index_gemm dsa_index index_scores topk_select trtllm_gen mla_value o_proj
        side              mla_query .............................................../
        """
        main, side = self.main, self.side
        self.packed_gemm(step.hidden, at.projected)  # dsa_tp.yaml:123
        side.wait_stream(main)
        self.query_norm(at.q_a, at.q_c)  # :123
        self.index_gemm(at.q_c, at.index_q)  # :123
        self.dsa_index(
            at.index_q, at.wk, at.wv, step.index_slots, self.index_kv, at.index_q8, at.index_w
        )  # :123
        self.index_scores(
            at.index_q8, at.index_w, self.index_kv, step.index_table, step.lengths, at.scores
        )  # :123
        self.topk_select(
            at.scores, step.lengths, step.block_table, self.latent_kv, at.selected, at.valid
        )  # :123
        with self.on(side):
            self.mla_query(at.q_a, at.kv_a, step.slots, self.latent_kv, query=at.query)  # :124
        main.wait_stream(side)  # trtllm_gen needs what side made
        self.trtllm_gen(
            self.latent_kv, at.selected, at.valid, query=at.query, latent=at.latent, pdl=False
        )  # :123 plain: reads `valid` before its wait
        self.mla_value(at.latent, at.gate, step.lengths, at.gated)  # :123
        self.o_proj(at.gated, out=step.out)  # :123

    def _fork_split_sparse_decode_mla_value(self, step: Step, at: SimpleNamespace) -> None:
        """Rows 64 (q 1) and 64 (q 4) on sm_90a.

        main  packed_gemm query_norm index_gemm dsa_index index_scores topk_select sparse_decode mla_value o_proj
        side                         mla_query_split ............................../
        """
        main, side = self.main, self.side
        self.packed_gemm(step.hidden, at.projected)  # dsa_tp.yaml:126
        self.query_norm(at.q_a, at.q_c)  # :126
        side.wait_stream(main)
        self.index_gemm(at.q_c, at.index_q)  # :126
        self.dsa_index(
            at.index_q, at.wk, at.wv, step.index_slots, self.index_kv, at.index_q8, at.index_w
        )  # :126
        self.index_scores(
            at.index_q8, at.index_w, self.index_kv, step.index_table, step.lengths, at.scores
        )  # :126
        self.topk_select(
            at.scores, step.lengths, step.block_table, self.latent_kv, at.selected, at.valid
        )  # :126
        with self.on(side):
            # :127
            self.mla_query_split(at.q_c, at.kv_a, step.slots, self.latent_kv, query=at.query)
        main.wait_stream(side)  # sparse_decode needs what side made
        # :126
        self.sparse_decode(self.latent_kv, at.selected, at.valid, query=at.query, latent=at.latent)
        self.mla_value(at.latent, at.gate, step.lengths, at.gated)  # :126
        self.o_proj(at.gated, out=step.out)  # :126

    def _fork_split_trtllm_gen_value_bmm_mla_gate(self, step: Step, at: SimpleNamespace) -> None:
        """Rows 64 (q 1) and 64 (q 4) on sm_100a.

        main  packed_gemm query_norm index_gemm dsa_index index_scores topk_select trtllm_gen value_bmm mla_gate o_proj
        side                         mla_query_split ............................../
        """
        main, side = self.main, self.side
        self.packed_gemm(step.hidden, at.projected)  # dsa_tp.yaml:126
        self.query_norm(at.q_a, at.q_c)  # :126
        side.wait_stream(main)
        self.index_gemm(at.q_c, at.index_q)  # :126
        self.dsa_index(
            at.index_q, at.wk, at.wv, step.index_slots, self.index_kv, at.index_q8, at.index_w
        )  # :126
        self.index_scores(
            at.index_q8, at.index_w, self.index_kv, step.index_table, step.lengths, at.scores
        )  # :126
        self.topk_select(
            at.scores, step.lengths, step.block_table, self.latent_kv, at.selected, at.valid
        )  # :126
        with self.on(side):
            # :127
            self.mla_query_split(at.q_c, at.kv_a, step.slots, self.latent_kv, query=at.query)
        main.wait_stream(side)  # trtllm_gen needs what side made
        self.trtllm_gen(
            self.latent_kv, at.selected, at.valid, query=at.query, latent=at.latent, pdl=False
        )  # :126 plain: reads `valid` before its wait
        self.value_bmm(at.latent, at.values, pdl=False)  # :126 plain: it never waits
        self.mla_gate(at.values, at.gate, step.lengths, at.gated)  # :126
        self.o_proj(at.gated, out=step.out)  # :126
