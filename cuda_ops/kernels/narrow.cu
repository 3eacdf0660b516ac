// One optimizer step in a single pass, with states in 16 or 8 bits and masters in fp32 or bf16. Formulas: see
// narrow_step.py and narrow_state.py.
// -DMASTER: storage type of the master; -DSTATE: of the states, CODES for 8 bits; -DGRAD, -DOUT: as in step.cu.

const int GROUP = 8;   // elements of a lane
const int LANES = 32;  // a warp has a block of 256 elements, with one scale for its codes
const int TABLE = 256;
const float SMALLEST = 0x1p-96f;

struct CODES {
  uint8 bits;
};

// Random bits of element `at`; the lower half is the first state's, the upper one the second's.
__device__ inline uint32 mixed(uint32 x) {
  x = (x ^ x >> 16) * 0x7feb352dU;
  x = (x ^ x >> 15) * 0x846ca68bU;
  return x ^ x >> 16;
}

__device__ inline uint32 random_bits(uint32 seed, int64 at) {
  return mixed(((uint32)at ^ seed) + (uint32)((uint64)at >> 32) * 0x9e3779b9U);
}

// Up or down with the chance that makes the mean right. inf stays inf, NaN NaN.
__device__ inline BFLOAT16 rounded(float x, uint32 chance) {
  uint32 u = FLOAT_AS_BITS(x);
  bool finite = (u & 0x7f800000) != 0x7f800000;
  BFLOAT16 result;
  result.bits = (finite ? u + (chance & 0xffff) : x != x ? u | 0x400000 : u) >> 16;
  return result;
}

// What a lane has of a block.
struct Part {
  int64 block, first, numel;
  bool whole;
  uint32 seed;
  int64 place;
  __device__ uint32 random(int k) const { return random_bits(seed, place + first + k); }
};

const int FIRST = 0, SECOND = 16, MASTER_BITS = -1;  // which of an element's random bits

__device__ inline uint32 chance(uint32 random, int which) {
  return which == MASTER_BITS ? mixed(random + 0x9e3779b9U) : random >> which;
}

__device__ inline void narrow(FLOAT32* kept, float*, const float*, bool, const Part& part, const float* x, int) {
  Vector<FLOAT32, GROUP> values;
#pragma unroll
  for (int k = 0; k < GROUP; ++k) values.at[k].store(x[k]);
  store<GROUP>(kept, part.first, part.numel, part.whole, values);
}

__device__ inline void narrow(BFLOAT16* kept, float*, const float*, bool, const Part& part, const float* x, int which) {
  Vector<BFLOAT16, GROUP> values;
#pragma unroll
  for (int k = 0; k < GROUP; ++k) values.at[k] = rounded(x[k], chance(part.random(k), which));
  store<GROUP>(kept, part.first, part.numel, part.whole, values);
}

__device__ inline void narrow(CODES* kept, float* scales, const float* table, bool has_sign, const Part& part,
                              const float* x, int) {
  if (!kept) return;
  uint32 largest = 0;  // magnitude, then whether it is positive; NaN's bits are larger than those of inf
#pragma unroll
  for (int k = 0; k < GROUP; ++k) {
    uint32 u = FLOAT_AS_BITS(x[k]), key = u << 1 | !(u >> 31);
    if (part.first + k < part.numel) largest = key > largest ? key : largest;
  }
  for (int mask = LANES / 2; mask > 0; mask /= 2) {
    uint32 other = __shfl_xor_sync(0xffffffff, largest, mask);
    largest = other > largest ? other : largest;
  }
  float magnitude = BITS_AS_FLOAT(largest >> 1);
  bool finite = largest >> 1 < 0x7f800000;
  float scale = magnitude < SMALLEST ? 0 : largest & 1 ? magnitude : -magnitude;
  float inverse = finite && scale != 0 ? 1 / scale : 0;
  if (threadIdx.x % LANES == 0) scales[part.block] = finite ? scale : BITS_AS_FLOAT(0x7fc00000);
  const float* bounds = table + TABLE;  // as a tree: see shared_tables
  Vector<CODES, GROUP> codes;
#pragma unroll
  for (int k = 0; k < GROUP; ++k) {
    float ratio = finite ? PRODUCT(x[k], inverse) : 0;
    int node = 1;
#pragma unroll
    for (int half = TABLE / 2; half > 0; half /= 2) node = 2 * node + (bounds[node] < ratio);
    int code = node - TABLE;
    codes.at[k].bits = !has_sign && code == 0 && ratio > 0 ? 1 : code;
  }
  store<GROUP>(kept, part.first, part.numel, part.whole, codes);
}

template <typename T> __device__ void widen(const T* kept, const float*, const float*, const Part& part, float* x) {
  Vector<T, GROUP> values = load<GROUP>(kept, part.first, part.numel, part.whole);
#pragma unroll
  for (int k = 0; k < GROUP; ++k) x[k] = values.at[k].load();
}

__device__ inline void widen(const CODES* kept, const float* scales, const float* table, const Part& part, float* x) {
  Vector<CODES, GROUP> codes = load<GROUP>(kept, part.first, part.numel, part.whole);
  float scale = kept ? scales[part.block] : 0;
#pragma unroll
  for (int k = 0; k < GROUP; ++k) x[k] = PRODUCT(table[codes.at[k].bits], scale);
}

// The tables of both maps in shared memory, for codes. Bounds are in breadth-first order, node n before 2n and 2n + 1:
// in sorted order all lanes of a warp would meet in a few of the 32 banks, since a binary search starts at powers of two.
template <typename T> __device__ const float* shared_tables(const T*, const float*) { return nullptr; }

__device__ inline const float* shared_tables(const CODES*, const float* tables) {
  __shared__ float copy[4 * TABLE];
  for (int i = threadIdx.x; i < 4 * TABLE; i += THREADS) {
    int row = i / TABLE, at = i % TABLE;
    int rank = at + 1, half = rank & -rank;  // the bound halves a range of 2 * half codes; the last one is not used
    bool bound = row % 2 == 1 && rank < TABLE;
    copy[row * TABLE + (bound ? TABLE / 2 / half + rank / (2 * half) : row % 2 == 1 ? 0 : at)] = tables[i];
  }
  __syncthreads();
  return copy;
}

template <typename Rule>
__device__ void run(const Rule& rule, MASTER* master, STATE* first, float* first_scales, STATE* second,
                    float* second_scales, const GRAD* grad, OUT* out, int64 numel, const float* tables, uint32 key,
                    int64 place, float step) {
  const float* table = shared_tables(first, tables);
  const float* other = table ? table + 2 * TABLE : nullptr;
  bool fits = aligned<GROUP>(master) && aligned<GROUP>(first) && aligned<GROUP>(second) && aligned<GROUP>(grad) &&
              aligned<GROUP>(out);
  uint32 seed = mixed(key ^ mixed((uint32)step));
  int64 lane = threadIdx.x % LANES, size = LANES * GROUP;
  for (int64 b = first_index() / LANES; b * size < numel; b += index_stride() / LANES) {
    Part part = {b, b * size + lane * GROUP, numel, false, seed, place};
    part.whole = fits && part.first + GROUP <= numel;
    float w[GROUP], x[GROUP], y[GROUP], g[GROUP];
    widen(master, nullptr, nullptr, part, w);
    widen(first, first_scales, table, part, x);
    widen(second, second_scales, other, part, y);
    widen(grad, nullptr, nullptr, part, g);
    Vector<OUT, GROUP> result;
#pragma unroll
    for (int k = 0; k < GROUP; ++k) {
      rule.update(g[k], w[k], x[k], y[k]);
      result.at[k].store(w[k]);
    }
    store<GROUP>(out, part.first, numel, part.whole, result);
    narrow(master, nullptr, nullptr, true, part, w, MASTER_BITS);
    narrow(first, first_scales, table, true, part, x, FIRST);
    narrow(second, second_scales, other, false, part, y, SECOND);
  }
}

// Scalars as in step.cu. key and place: what tells the random bits of this piece's elements apart from others'.
extern "C" __global__ void narrow_adam(MASTER* master, STATE* first, float* first_scales, STATE* second,
                                       float* second_scales, const GRAD* grad, OUT* out, int64 numel,
                                       const float* tables, int64 key, int64 place, const float* step_at, float step,
                                       const float* lr_at, float lr, const float* multiplier_at, float multiplier,
                                       const float* found_inf_at, float found_inf, float log_beta1, float log_beta2,
                                       float one_minus_beta1, float one_minus_beta2, float eps, float weight_decay,
                                       int64 decoupled) {
  if (scalar(found_inf_at, found_inf) != 0) return;
  step = scalar(step_at, step);
  Adam rule = adam_rule(step, scalar(lr_at, lr), scalar(multiplier_at, multiplier), log_beta1, log_beta2,
                        one_minus_beta1, one_minus_beta2, eps, weight_decay, decoupled);
  run(rule, master, first, first_scales, second, second_scales, grad, out, numel, tables, (uint32)key, place, step);
}

extern "C" __global__ void narrow_sgd(MASTER* master, STATE* first, float* first_scales, const GRAD* grad,
                                      OUT* out, int64 numel, const float* tables, int64 key, int64 place,
                                      const float* step_at, float step,
                                      const float* lr_at, float lr, const float* multiplier_at, float multiplier,
                                      const float* found_inf_at, float found_inf, float momentum,
                                      float one_minus_dampening, float weight_decay, int64 nesterov) {
  if (scalar(found_inf_at, found_inf) != 0) return;
  step = scalar(step_at, step);
  Sgd rule = sgd_rule(step, scalar(lr_at, lr), scalar(multiplier_at, multiplier), momentum, one_minus_dampening,
                      weight_decay, nesterov);
  run(rule, master, first, first_scales, (STATE*)nullptr, nullptr, grad, out, numel, tables, (uint32)key, place, step);
}

extern "C" __global__ void narrow_lion(MASTER* master, STATE* first, float* first_scales, const GRAD* grad,
                                      OUT* out, int64 numel, const float* tables, int64 key, int64 place,
                                      const float* step_at, float step,
                                       const float* lr_at, float lr, const float* multiplier_at, float multiplier,
                                       const float* found_inf_at, float found_inf, float one_minus_beta1,
                                       float one_minus_beta2, float weight_decay) {
  if (scalar(found_inf_at, found_inf) != 0) return;
  step = scalar(step_at, step);
  Lion rule = lion_rule(scalar(lr_at, lr), scalar(multiplier_at, multiplier), one_minus_beta1, one_minus_beta2,
                        weight_decay);
  run(rule, master, first, first_scales, (STATE*)nullptr, nullptr, grad, out, numel, tables, (uint32)key, place, step);
}
