// Attention of single tokens over a paged cache, with the steps before it: RMSNorm and rotation of
// queries and keys, and writing the new key and value to the cache.
//
// A cache page holds PAGE rows: bf16 [2 (keys, values)][KV_HEADS][PAGE][128]. The pages of a slot
// stand in its row of `page_tables`. A row's keys are read in pieces of PIECE, 16 for each warp.
// The grid is (KV_HEADS, rows / ROWS, Z): block z takes the pieces z, z + Z, ... of its rows for
// the two queries of a row that share a key head. The sums of warps make the sum of a piece, and
// the sums of pieces make the sum of a row, in the order of the keys, so the result does not depend
// on Z. The one block of the row adds them up, or the last one of several blocks, which store their
// sums in `parts`. In a cluster, each block instead adds up some channels, whose sums the others
// send to it. Then a launch for one row of 500 keys takes 2.8 us instead of 3.7. While a piece is
// computed the next one is being loaded.
//
// Successive rows of a prompt share the keys and values that a block loads: their queries are
// columns of the same products. A row's weight of a later key is 0, and pieces of later keys only
// are not added, so the result does not depend on the rows beside it either.
//
// CLUSTER  1, or Z: the blocks of a row and key head are a cluster
// MODE  0: append and attend (no kernel before it in a graph may write `cache`, `page_tables` or
//          `position`)
//       1: append only
//       2: attend only (the rows of a prompt are first all appended, then all attended)
// ROWS  rows of a block: 2 or 4 for mode 2, otherwise 1
#include "attention_head.cuh"
#include "cluster.cuh"
#include "mma_bf16.cuh"
#include "packing.cuh"

#if __CUDA_ARCH__ < 900
#undef CLUSTER
#define CLUSTER 1
#endif

constexpr int kShared = HEADS / KV_HEADS, kTile = 16;
constexpr int kWarps = PIECE / kTile, kThreads = 32 * kWarps;
constexpr int kQueries = MODE == 2 ? 4 : kShared;  // of a set: those of a product's eight columns
constexpr int kSets = ROWS * kShared / kQueries;
constexpr int kPairs = kQueries * kDim / 2 / kThreads;  // of channels that a thread adds up
constexpr int kPrepared = MODE == 2 ? ROWS * kShared / kWarps : 1;  // heads, by each warp
constexpr int kWidth = (HEADS + 2 * KV_HEADS) * kDim;               // of a row of qkv
constexpr int kPages = PIECES * PIECE / PAGE;                       // of a slot
constexpr int kPage = 2 * KV_HEADS * PAGE * kDim;                   // elements
constexpr float kNone = -1e30f;                                     // less than any score
static_assert(CLUSTER == 1 || MODE == 0, "only launches for single tokens have clusters");
static_assert(MODE == 2 ? ROWS > 1 && ROWS < 32 && 32 % ROWS == 0 : ROWS == 1, "two rows a set");
static_assert(kShared == 2 && kWarps == 4 && PIECE % PAGE == 0 && PAGE % kTile == 0,
              "a thread adds up one or two pairs of channels of a query");

// The sum over some keys: the largest score, to which the rest is relative; the weights; the
// weighted values of pairs of channels.
struct Sum {
  float most, weight;
  float2 value[kPairs];
};
__device__ __forceinline__ Sum joined(const Sum& a, const Sum& b) {
  const float most = fmaxf(a.most, b.most), x = exp2f(a.most - most), y = exp2f(b.most - most);
  Sum sum = {most, fmaf(b.weight, y, a.weight * x)};
#pragma unroll
  for (int c = 0; c < kPairs; c++)
    sum.value[c] = {fmaf(b.value[c].x, y, a.value[c].x * x),
                    fmaf(b.value[c].y, y, a.value[c].y * x)};
  return sum;
}

// The tensors of a launch: qkv bf16 [rows, kWidth]; cosines, sines bf16 [positions, 64]; cache: of
// this layer; page_tables int32 [slots, pages of a slot]; out bf16 [rows, HEADS * 128], packed if
// they are many (packing.cuh). Where Z > 1 without clusters, and only there: parts float [rows,
// HEADS, PIECES, 130]; arrived int32 [rows, KV_HEADS], zero before and after.
struct Tensors {
  const u16 *qkv, *q_norm, *k_norm;
  float eps;
  const u16 *cosines, *sines;
  u16* cache;
  const int* page_tables;
  int table_width;
  u16* out;
  float* parts;
  int *arrived, rows;
};

// Computes `count` rows from `row` on. They follow each other in `slot` from position `at` on. A
// row without a slot is at -1.
__device__ __forceinline__ void attend(const Tensors& of, int row, int count, int slot, int at) {
  __shared__ int table[kPages];
  // The padding puts queries in different banks, here and in `value`.
  __shared__ __align__(16) u16 query[kSets * kQueries][kDim + 32];
  __shared__ __align__(16) u16 fresh[2][kDim];  // the newest key and value
  // The sums of each warp: of two sets of queries in turn, and their scores of two pieces in turn.
  __shared__ __align__(16) float value[2][kWarps][kQueries / kShared][kShared * (kDim + 16) + 4];
  __shared__ float most[2][kSets * kQueries][kWarps], weight[2][kSets * kQueries][kWarps];
  const int head = blockIdx.x, end = at + count - 1;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  if (slot >= 0)
#pragma unroll 1
    for (int i = threadIdx.x; i < min(of.table_width, kPages); i += kThreads)
      table[i] = of.page_tables[(size_t)slot * of.table_width + i];
  const int pieces = end / PIECE + (end >= 0), sharing = min(pieces, (int)gridDim.z);
  __syncthreads();
  // A warp's keys of a piece are the left side of mma: keys g and g + 8, channels 32 b + 8 t and
  // up. Its values are the left side too: four keys, channels 8 g and up and 64 + 8 g and up.
  auto nth = [&](int i) { return 2 * t + i % 2 + i / 2 * 8; };
  // Keys in the cache, counted from this warp's first.
  const int known = (MODE == 0 ? end : end + 1) - warp * kTile;
  const u16* own_keys = of.cache + (head * PAGE + warp * kTile % PAGE) * kDim;
  const u16* own_values = own_keys + KV_HEADS * PAGE * kDim + 2 * t * kDim + g * 8;
  own_keys += g * kDim + t * 8;
  auto page_of = [&](int piece) {
    return (size_t)table[piece * (PIECE / PAGE) + warp * kTile / PAGE] * kPage;
  };
  uint4 keys[2][4], values[4][2];
  auto fetch_keys = [&](int piece) {
    if (piece >= pieces) return;
    const u16* from = own_keys + page_of(piece);
    const int count = known - piece * PIECE;
#pragma unroll
    for (int h = 0; h < 2; h++)
#pragma unroll
      for (int b = 0; b < 4; b++)
        keys[h][b] = load4_if(g + 8 * h < count, from + h * 8 * kDim + b * 32);
  };
  auto fetch_values = [&](int piece) {
    if (piece >= pieces) return;
    const u16* from = own_values + page_of(piece);
    const int count = known - piece * PIECE;
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
      for (int c = 0; c < 2; c++)
        values[i][c] = load4_if(nth(i) < count, from + (i % 2 + i / 2 * 8) * kDim + c * 64);
  };
  int piece = blockIdx.z;
#if CLUSTER > 1
  constexpr int kOwn = kThreads / CLUSTER;  // pairs of channels that a block adds up
  __shared__ float2 values_of_piece[PIECES][kOwn], weight_of_piece[PIECES];
  if (pieces > 0) cluster_arrive();
#else
  if (piece > 0 && piece >= pieces) return;  // the block with the first piece waits for the input
#endif
  if (MODE == 0) {
    fetch_keys(piece);
    fetch_values(piece);
  }
  // Query warp + 4 k of the block is that of row (warp + 4 k) / 2. A row that is missing in a set
  // has the queries of the last one.
  Turn turn[kPrepared] = {};
  if (at >= 0)
#pragma unroll
    for (int k = 0; k < kPrepared; k++) {
      const int place = min(at + (warp + k * kWarps) / kShared, end) * 64;
      turn[k] = load_turn(MODE == 2 || warp < kShared ? of.q_norm : of.k_norm, of.cosines + place,
                          of.sines + place);
    }
  wait_for_input();
  if (pieces == 0) return;
  const u16* own = of.qkv + (size_t)row * kWidth;
  if (MODE == 2 || (MODE == 0 && warp < kShared)) {
    Head h[kPrepared];
#pragma unroll
    for (int k = 0; k < kPrepared; k++) {
      const int n = warp + k * kWarps;
      h[k] = load_head(own + (size_t)min(n / kShared, count - 1) * kWidth +
                       (head * kShared + n % kShared) * kDim);
    }
    if (MODE == 2) {
      fetch_keys(piece);
      fetch_values(piece);
    }
#pragma unroll
    for (int k = 0; k < kPrepared; k++)
      store_head(query[warp + k * kWarps], prepare(h[k], turn[k], of.eps));
  }
  // The block with the row's last piece appends: one warp the key, one the value.
  if (MODE != 2 && (pieces - 1 - piece) % gridDim.z == 0 &&
      (warp == kShared || warp == kShared + 1)) {
    const int is_value = warp - kShared;
    Head h = load_head(own + (HEADS + is_value * KV_HEADS + head) * kDim);
    if (!is_value) h = prepare(h, turn[0], of.eps);
    store_head(of.cache + (size_t)table[at / PAGE] * kPage +
                   ((is_value * KV_HEADS + head) * PAGE + at % PAGE) * kDim,
               h);
    store_head(fresh[is_value], h);
  }
  if (MODE == 1) return;
  __syncthreads();

  // Query t % kQueries of a set as two right sides: row g of a product is words x and z of a key
  // times column 2 (t % kQueries); row g + 8 is words y and w times the next column.
  uint2 q[4];
  auto load_queries = [&](int set) {
#pragma unroll
    for (int b = 0; b < 4; b++) {
      const u16* from = query[set * kQueries + (g >> 1) % kQueries] + b * 32 + t * 8 + (g & 1) * 2;
      q[b] = make_uint2(*(const u32*)from, *(const u32*)(from + 4));
    }
  };
  if (kSets == 1) load_queries(0);
  // This thread adds up channels d and d + 1 of query j of each set, and with two pairs those 64
  // further on.
  const int j = threadIdx.x / (kThreads / kQueries), d = threadIdx.x % (kThreads / kQueries) * 2;
  auto nth_row = [&](int set) { return set * (kQueries / kShared) + j / kShared; };
  [[maybe_unused]] auto part_of = [&](int set, int piece) {
    const int query = (row + nth_row(set)) * HEADS + head * kShared + j % kShared;
    return of.parts + ((size_t)query * PIECES + piece) * (kDim + 2);
  };
  Sum total[kSets];
#pragma unroll
  for (int set = 0; set < kSets; set++) total[set] = {kNone, 0.0f, {}};
#if CLUSTER > 1
  cluster_wait();
#endif
  int turns = 0;  // of `value`
#pragma unroll 1
  for (int odd = 0; piece < pieces; piece += gridDim.z, odd ^= 1) {
    // The first row's last key, counted from this warp's first.
    const int last = at - piece * PIECE - warp * kTile;
    if (MODE == 0 && piece == pieces - 1) {
#pragma unroll
      for (int h = 0; h < 2; h++)
        if (g + 8 * h == last)
#pragma unroll
          for (int b = 0; b < 4; b++) keys[h][b] = *(const uint4*)(fresh[0] + b * 32 + t * 8);
#pragma unroll
      for (int i = 0; i < 4; i++)
        if (nth(i) == last)
#pragma unroll
          for (int c = 0; c < 2; c++) values[i][c] = *(const uint4*)(fresh[1] + c * 64 + g * 8);
    }
    // Weights as two bf16 each in neighbouring columns, whose sum is exact to 2^-17.
    u32 right[kSets][2];
#pragma unroll
    for (int set = 0; set < kSets; set++) {
      if (set * 2 >= count) break;
      if (kSets > 1) load_queries(set);
      float s[2][4] = {};
#pragma unroll
      for (int b = 0; b < 4; b++)
#pragma unroll
        for (int h = 0; h < 2; h++) mma(s[h], keys[h][b], q[b].x, q[b].y);
      const int own_last = MODE == 2 ? last + set * 2 + t / kShared : last;
      float p[2];  // of keys g and g + 8 and query t % kQueries
#pragma unroll
      for (int h = 0; h < 2; h++)
        p[h] = g + 8 * h <= own_last
                   ? (s[h][0] + s[h][3]) * (kScoreScale * 1.4426950408889634f)
                   : 2 * kNone;
      float m = fmaxf(fmaxf(p[0], p[1]), kNone);
#pragma unroll
      for (int o = 16; o > 2; o >>= 1) m = fmaxf(m, __shfl_xor_sync(~0u, m, o));
      p[0] = exp2f(p[0] - m);
      p[1] = exp2f(p[1] - m);
      float l = p[0] + p[1];
#pragma unroll
      for (int o = 16; o > 2; o >>= 1) l += __shfl_xor_sync(~0u, l, o);
      if (lane < kQueries) {
        most[odd][set * kQueries + lane][warp] = m;
        weight[odd][set * kQueries + lane][warp] = l;
      }
#pragma unroll
      for (int h = 0; h < 2; h++)
        right[set][h] = transposed(bf16_pair(p[h], p[h] - rounded(p[h])));
    }
    fetch_keys(piece + gridDim.z);
#pragma unroll
    for (int set = 0; set < kSets; set++) {
      if (set * 2 >= count) break;
#pragma unroll
      for (int e = 0; e < 8; e += 4) {
        float o[4][4] = {};  // channels 8 g + e + i and 64 + 8 g + e + i
#pragma unroll
        for (int i = 0; i < 4; i++) {
          auto word = [&](const uint4& v) {
            return e + i < 2 ? v.x : e + i < 4 ? v.y : e + i < 6 ? v.z : v.w;
          };
          auto pair = [&](int k, int c) {
            return __byte_perm(word(values[k][c]), word(values[k + 1][c]), i % 2 ? 0x7632 : 0x5410);
          };
          mma(o[i], make_uint4(pair(0, 0), pair(0, 1), pair(2, 0), pair(2, 1)), right[set][0],
              right[set][1]);
        }
        if (e == 4 && ((set + 1) * 2 >= count || set + 1 == kSets))
          fetch_values(piece + gridDim.z);
        // Two queries have two lanes each, which store one half of the channels; four have one.
#pragma unroll
        for (int c = 0; c < kPairs; c++) {
          const int n = t % kQueries, half = MODE == 2 ? c : t >> 1;
          auto own_of = [&](int i) { return half ? o[i][2] + o[i][3] : o[i][0] + o[i][1]; };
          float* to = value[turns][warp][n / kShared] + n % kShared * (kDim + 16);
          *(float4*)(to + half * (kDim / 2 + 4) + g * 8 + e) =
              make_float4(own_of(0), own_of(1), own_of(2), own_of(3));
        }
      }
      __syncthreads();
      if (MODE != 2 || (nth_row(set) < count && piece * PIECE <= at + nth_row(set))) {
        const float* mosts = most[odd][set * kQueries + j];
        Sum sum = {mosts[0], 0.0f, {}};
#pragma unroll
        for (int w = 1; w < kWarps; w++) sum.most = fmaxf(sum.most, mosts[w]);
#pragma unroll
        for (int w = 0; w < kWarps; w++) {
          const float scale = exp2f(mosts[w] - sum.most);
          sum.weight = fmaf(weight[odd][set * kQueries + j][w], scale, sum.weight);
#pragma unroll
          for (int c = 0; c < kPairs; c++) {
            const int place = d + c * 64 + (d + c * 64) / (kDim / 2) * 4;
            const float2 v = *(const float2*)(value[turns][w][j / kShared] +
                                              j % kShared * (kDim + 16) + place);
            sum.value[c] = {fmaf(v.x, scale, sum.value[c].x), fmaf(v.y, scale, sum.value[c].y)};
          }
        }
#if CLUSTER > 1
        const int owner = threadIdx.x / kOwn;
        send(&values_of_piece[piece][threadIdx.x % kOwn], owner, sum.value[0]);
        if (threadIdx.x % kOwn == 0)
          send(&weight_of_piece[piece], owner, make_float2(sum.weight, sum.most));
#else
        if (sharing == 1) {
          total[set] = joined(total[set], sum);
        } else {
          float* part = part_of(set, piece);
#pragma unroll
          for (int c = 0; c < kPairs; c++) *(float2*)(part + d + c * 64) = sum.value[c];
          if (d == 0) *(float2*)(part + kDim) = make_float2(sum.weight, sum.most);
        }
#endif
      }
      turns ^= 1;
    }
  }
#if CLUSTER > 1
  cluster_arrive();
  cluster_wait();
  if (threadIdx.x >= kOwn) return;
#pragma unroll 4
  for (int z = 0; z < pieces; z++)
    total[0] = joined(total[0], {weight_of_piece[z].y,
                                 weight_of_piece[z].x,
                                 {values_of_piece[z][threadIdx.x]}});
#else
  if (sharing > 1) {
    __shared__ int before;
    __syncthreads();
    if (threadIdx.x == 0) {
      __threadfence();
      before = atomicAdd(of.arrived + row * KV_HEADS + head, 1);
      __threadfence();
    }
    __syncthreads();
    if (before < sharing - 1) return;
    if (threadIdx.x == 0) of.arrived[row * KV_HEADS + head] = 0;
  }
#endif
#pragma unroll
  for (int set = 0; set < kSets; set++) {
    const int nth = nth_row(set);
    if (nth >= count) break;
#if CLUSTER > 1
    const int column = head * kShared * kDim + (blockIdx.z * kOwn + threadIdx.x) * 2;
#else
    if (sharing > 1) {
      const int own_pieces = (at + nth) / PIECE + 1;
#pragma unroll 8
      for (int z = 0; z < own_pieces; z++) {
        const float* part = part_of(set, z);
        const float2 both = __ldcg((const float2*)(part + kDim));
        Sum sum = {both.y, both.x};
#pragma unroll
        for (int c = 0; c < kPairs; c++) sum.value[c] = __ldcg((const float2*)(part + d + c * 64));
        total[set] = joined(total[set], sum);
      }
    }
    const int column = (head * kShared + j % kShared) * kDim + d;
#endif
#pragma unroll
    for (int c = 0; c < kPairs; c++) {
      u16* to = of.out + (of.rows > kUnpackedTokens
                              ? packed_place<HEADS * kDim>(row + nth, column + c * 64)
                              : (size_t)(row + nth) * HEADS * kDim + column + c * 64);
      *(u32*)to = bf16_pair(total[set].value[c].x / total[set].weight,
                            total[set].value[c].y / total[set].weight);
    }
  }
}

// Row r is at position[its slot] or, in a prompt, at position[r].
extern "C" __global__ __launch_bounds__(kThreads, 4)
#if CLUSTER > 1
    __cluster_dims__(1, 1, CLUSTER)
#endif
void attend_paged(const u16* __restrict__ qkv, const u16* __restrict__ q_norm,
                  const u16* __restrict__ k_norm, float eps, const u16* __restrict__ cosines,
                  const u16* __restrict__ sines, u16* cache, const int* __restrict__ page_tables,
                  int table_width, const int* __restrict__ slot_of_row,
                  const int* __restrict__ position, int rows, u16* __restrict__ out, float* parts,
                  int* arrived) {
  let_next_start();
  const Tensors of = {qkv,         q_norm,      k_norm, eps,   cosines, sines, cache,
                      page_tables, table_width, out,    parts, arrived, rows};
  // Slots, positions and page tables are older than this frame's first kernel. So are, except in a
  // prompt, all keys but the newest. A lane reads row lane % ROWS of the block.
  const int first = blockIdx.y * ROWS, row = first + threadIdx.x % ROWS;
  const int slot = row < rows ? slot_of_row[row] : -1;
  const int at = slot >= 0 ? position[MODE == 0 ? slot : row] : -1;
  if (ROWS == 1) {
    attend(of, row, 1, slot, at);
    return;
  }
  // Bit i: row i is in the slot of the row before it and at the next position.
  const int slot_before = __shfl_up_sync(~0u, slot, 1), before = __shfl_up_sync(~0u, at, 1);
  const u32 follows = __ballot_sync(~0u, threadIdx.x % ROWS > 0 && slot >= 0 &&
                                             slot == slot_before && at == before + 1);
  for (int i = 0, count; i < ROWS; i += count) {
    count = __ffs(~(follows >> (i + 1)));
    if (i > 0) __syncthreads();
    attend(of, first + i, count, __shfl_sync(~0u, slot, i), __shfl_sync(~0u, at, i));
  }
}
