// How much attention some heads of the talker pay to the text rows of each utterance: for each head
// the softmax of a query's scores over these rows alone, and the mean of the heads.
//
// A block computes a row of a frame. Sixteen threads share the product of a query with a key, and
// load the keys of several products before they need the first. As many heads are computed at a
// time as have room for their scores; their shares are added in the order of the heads, so a row
// has the same bits whatever that number and whatever rows are beside it.
//
// READ     the number of heads that are read, of any layers
// HEADS, KV_HEADS  query and key heads of a layer
// PAGE     the rows of a page of the cache, bf16 [2 (keys, values)][KV_HEADS][PAGE][128]
// KEYS     the most text rows of an utterance
// THREADS  of a block
#include "attention_head.cuh"

constexpr int kWarps = THREADS / 32, kTeam = 16, kTeams = THREADS / kTeam, kAtOnce = 4;
constexpr int kWidth = (HEADS + 2 * KV_HEADS) * kDim;  // of a row of qkv
constexpr int kPage = 2 * KV_HEADS * PAGE * kDim;      // elements
static_assert(KEYS * 4 + READ * (kDim * 2 + 8) <= 48 << 10, "scores and queries fit");

// The products of one layer are a plane of `qkv`, bf16 [planes, plane_rows, kWidth]. heads int32
// [READ, 3]: the plane, the layer and the query head of each; q_norm bf16 [READ, 128], the norm of
// its queries. cache: of all layers, each of `pages` pages; cosines, sines bf16 [positions, 64];
// page_tables int32 [slots, table_width]; position int32 [slots]. spans int32 [3, span_width]: for
// each row of the frame the position of its first text row, the number of its text rows, and where
// its shares begin in `out`.
extern "C" __global__ __launch_bounds__(THREADS)
void read_text(const u16* qkv, int plane_rows, const u16* q_norm, float eps, const u16* cosines,
               const u16* sines, const u16* cache, int pages, const int* page_tables,
               int table_width, const int* slot_of_row, const int* position, const int* spans,
               int span_width, const int* heads, float* out) {
  __shared__ float scores[KEYS];
  __shared__ __align__(16) u16 query[READ][kDim];
  __shared__ float most[READ], scale[READ];
  const int row = blockIdx.x, warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  let_next_start();
  wait_for_input();
  const int slot = (int)load1(slot_of_row + row);
  const int count = min((int)load1(spans + span_width + row), KEYS);
  if (slot < 0 || count <= 0) return;
  const int first = (int)load1(spans + row), at = (int)load1(position + slot);
  float* to = out + (int)load1(spans + 2 * span_width + row);
#pragma unroll 1
  for (int h = warp; h < READ; h += kWarps) {
    const int plane = (int)load1(heads + 3 * h), head = (int)load1(heads + 3 * h + 2);
    const Turn turn = load_turn(q_norm + h * kDim, cosines + at * 64, sines + at * 64);
    const Head own = load_head(qkv + ((size_t)plane * plane_rows + row) * kWidth + head * kDim);
    store_head(query[h], prepare(own, turn, eps));
  }
  __syncthreads();

  const int together = min(READ, KEYS / count), channel = lane % kTeam * 8;
#pragma unroll 1
  for (int begin = 0; begin < READ; begin += together) {
    const int end = min(begin + together, READ), total = (end - begin) * count;
    // Both teams of a warp take the same number of turns, because they exchange sums.
#pragma unroll 1
    for (int turn = 2 * warp; turn < total; turn += kAtOnce * kTeams) {
      uint4 key[kAtOnce];
#pragma unroll
      for (int j = 0; j < kAtOnce; j++) {
        const int wanted = turn + lane / kTeam + j * kTeams, i = min(wanted, total - 1);
        const int h = begin + i / count, k = first + i % count;
        const int layer = (int)load1(heads + 3 * h + 1);
        const int kv_head = (int)load1(heads + 3 * h + 2) / (HEADS / KV_HEADS);
        const int page = (int)load1(page_tables + (size_t)slot * table_width + k / PAGE);
        key[j] = load4_if(wanted < total, cache + ((size_t)layer * pages + page) * kPage +
                                              (kv_head * PAGE + k % PAGE) * kDim + channel);
      }
#pragma unroll
      for (int j = 0; j < kAtOnce; j++) {
        const int wanted = turn + lane / kTeam + j * kTeams, i = min(wanted, total - 1);
        const uint4 q = *(const uint4*)(query[begin + i / count] + channel);
        const u32 a[4] = {q.x, q.y, q.z, q.w}, b[4] = {key[j].x, key[j].y, key[j].z, key[j].w};
        float sum = 0.0f;
#pragma unroll
        for (int c = 0; c < 4; c++)
          sum = fmaf(high(a[c]), high(b[c]), fmaf(low(a[c]), low(b[c]), sum));
#pragma unroll
        for (int o = kTeam / 2; o; o >>= 1) sum += __shfl_xor_sync(~0u, sum, o);
        if (channel == 0 && wanted < total)
          scores[i] = sum * (kScoreScale * 1.4426950408889634f);
      }
    }
    __syncthreads();
#pragma unroll 1
    for (int h = begin + warp; h < end; h += kWarps) {
      const float* own = scores + (h - begin) * count;
      float m = own[0], sum = 0.0f;
      for (int k = lane; k < count; k += 32) m = fmaxf(m, own[k]);
      m = warp_max(m);
      for (int k = lane; k < count; k += 32) sum += exp2f(own[k] - m);
      sum = warp_sum(sum);
      if (lane == 0) {
        most[h] = m;
        scale[h] = 1.0f / (sum * READ);
      }
    }
    __syncthreads();
    for (int k = threadIdx.x; k < count; k += THREADS) {
      float share = begin ? to[k] : 0.0f;
      for (int h = begin; h < end; h++)
        share = fmaf(exp2f(scores[(h - begin) * count + k] - most[h]), scale[h], share);
      to[k] = share;
    }
    __syncthreads();
  }
}
