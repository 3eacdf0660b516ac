// Block quantisation: codes of 8 or 4 bits, and a scale a block. Formulas and layout: see quantize.py.
// -DVALUES: storage type of what is quantised or comes back; -DERROR: of what was lost before, or NONE.

const int GROUP = 8;   // elements that a thread takes at a time: 16 bytes of a 16-bit type, a word of 4-bit codes
const int LANES = 32;  // a warp works on a block of elements together
const float SMALLEST = 0x1p-126f;
typedef Vector<uint32, 2> Words;

struct Group {
  Vector<VALUES, GROUP> values;
  Vector<ERROR, GROUP> error;
  __device__ float at(int k) const { return values.at[k].load() + error.at[k].load(); }
};

// A warp for each block: its largest value, then codes and errors, for which the block is read again from the cache.
// Rows of row_blocks blocks each have a row of packed, of row_words 4-byte words.
extern "C" __global__ void quantize(const VALUES* values, ERROR* error, uint32* packed, int64 row_blocks,
                                    int64 row_words, int64 numel, int64 block, int64 bits, float beta,
                                    float one_minus_beta) {
  bool fits = aligned<GROUP>(values) && aligned<GROUP>(error), wide = bits == 8;
  bool pairs = wide && aligned<2>(packed) && row_words % 2 == 0;
  int64 lane = threadIdx.x % LANES;
  for (int64 b = first_index() / LANES; b < numel / block; b += index_stride() / LANES) {
    int64 first = b * block + lane * GROUP, stop = (b + 1) * block;
    int64 row = (uint32)b / (uint32)row_blocks, row_start = row * row_blocks * block;
    uint32* codes = packed + row * row_words;
    float* scales = (float*)(codes + row_blocks * block * bits / 32);
    uint32 largest = 0;  // as bits: those of NaN are larger than those of inf
    for (int64 i = first; i < stop; i += LANES * GROUP) {
      Group group = {load<GROUP>(values, i, numel, fits), load<GROUP>(error, i, numel, fits)};
#pragma unroll
      for (int k = 0; k < GROUP; ++k) {
        uint32 magnitude = FLOAT_AS_BITS(group.at(k)) & 0x7fffffff;
        largest = magnitude > largest ? magnitude : largest;
      }
    }
    for (int mask = LANES / 2; mask > 0; mask /= 2) {
      uint32 other = __shfl_xor_sync(0xffffffff, largest, mask);
      largest = other > largest ? other : largest;
    }
    bool finite = largest < 0x7f800000;
    float scale = fmaxf(BITS_AS_FLOAT(largest) / (wide ? 127.0f : 7.0f), SMALLEST);
    if (largest == 0) scale = 0;
    float inverse = scale > 0 ? 1 / scale : 0;
    if (lane == 0) scales[b - row * row_blocks] = finite ? scale : BITS_AS_FLOAT(0x7fc00000);
    for (int64 i = first; i < stop; i += LANES * GROUP) {
      Group group = {load<GROUP>(values, i, numel, fits), load<GROUP>(error, i, numel, fits)};
      Words words = {};
#pragma unroll
      for (int k = 0; k < GROUP; ++k) {
        float x = group.at(k), code = finite ? rintf(PRODUCT(x, inverse)) : 0;
        uint32 digits = (uint32)(int)code;
        if (wide) words.at[k / 4] |= (digits & 255) << 8 * (k % 4);
        else words.at[0] |= (digits & 15) << 4 * k;
        float lost = x - PRODUCT(code, scale);
        group.error.at[k].store(PRODUCT(beta, group.error.at[k].load()) + PRODUCT(one_minus_beta, lost));
      }
      uint32* target = codes + (i - row_start) * bits / 32;
      if (wide) store<2>(target, 0, 2, pairs, words);
      else *target = words.at[0];
      if (finite) store<GROUP>(error, i, numel, fits, group.error);
    }
  }
}

// A thread for each group. out has parts of part_blocks blocks, each the sum of as many rows of packed as added says,
// in their order: of one part many rows are added, or of many parts each has one row. row_words: 4-byte words of a row.
extern "C" __global__ void dequantize(const uint32* packed, int64 added, int64 row_words, int64 part_blocks,
                                      VALUES* out, int64 numel, int64 block, int64 bits) {
  bool fits = aligned<GROUP>(out), wide = bits == 8;
  bool pairs = wide && aligned<2>(packed) && row_words % 2 == 0;
  for (int64 i = first_index() * GROUP; i < numel; i += index_stride() * GROUP) {
    int64 b = i / block, part = (uint32)b / (uint32)part_blocks;
    int64 at = (i - part * part_blocks * block) * bits / 32;
    int64 scale_at = part_blocks * block * bits / 32 + b - part * part_blocks;
    Vector<float, GROUP> sums = {};
    for (int64 row = part; row < part + added; ++row) {
      const uint32* start = packed + row * row_words;
      Words words = load<2>(start + at, 0, wide ? 2 : 1, pairs);
      float scale = BITS_AS_FLOAT(start[scale_at]);
#pragma unroll
      for (int k = 0; k < GROUP; ++k) {
        int code = wide ? (int)(words.at[k / 4] << (24 - 8 * (k % 4))) >> 24 : (int)(words.at[0] << (28 - 4 * k)) >> 28;
        sums.at[k] += PRODUCT((float)code, scale);
      }
    }
    Vector<VALUES, GROUP> result;
#pragma unroll
    for (int k = 0; k < GROUP; ++k) result.at[k].store(sums.at[k]);
    store<GROUP>(out, i, numel, fits, result);
  }
}
