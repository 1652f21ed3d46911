/* Reductions, one element a work item: target[i] = target[i] OP source[i]. For OpenCL and for CUDA, which define before it:
 *   KERNEL, GLOBAL          what a kernel and a pointer to the device's memory are declared with
 *   INDEX                   this work item's number
 *   FUNCTION                what other functions are declared with
 *   U16, U32, U64, S64      integers of so many bits, the last with a sign
 *   FLOAT_OF, BITS_OF       a float of a U32 and back, bit by bit; DOUBLE_OF, LONG_BITS_OF of a U64 if there are doubles
 *   HALF_TO_FLOAT, FLOAT_TO_HALF   of a U16 and back, rounded to the nearest, ties to even
 * Elements are loaded and stored as unsigned integers, so that what is only chosen keeps its bits. */

#define PLUS(a, b) ((a) + (b))
#define TIMES(a, b) ((a) * (b))
/* Whether b takes the place of a. Of what is no number, b != b is true. */
#define IS_LESS(a, b) ((b) < (a) || (b) != (b))
#define IS_GREATER(a, b) ((b) > (a) || (b) != (b))

#define COMPUTE(NAME, STORED, LOAD, STORE, OP)                                                                        \
    KERNEL void NAME(GLOBAL STORED *target, U64 target_at, GLOBAL const STORED *source, U64 source_at, U64 count) {   \
        U64 i = INDEX;                                                                                                \
        if (i < count) {                                                                                              \
            STORED a = target[target_at + i], b = source[source_at + i];                                              \
            target[target_at + i] = STORE(OP(LOAD(a), LOAD(b)));                                                      \
        }                                                                                                             \
    }

#define CHOOSE(NAME, STORED, LOAD, IS_BETTER)                                                                         \
    KERNEL void NAME(GLOBAL STORED *target, U64 target_at, GLOBAL const STORED *source, U64 source_at, U64 count) {   \
        U64 i = INDEX;                                                                                                \
        if (i < count) {                                                                                              \
            STORED a = target[target_at + i], b = source[source_at + i];                                              \
            target[target_at + i] = IS_BETTER(LOAD(a), LOAD(b)) ? b : a;                                              \
        }                                                                                                             \
    }

/* ADDEND is what is computed with, ORDERED what is compared: integers are compared with their sign, and wrap without. */
#define REDUCTIONS(TYPE, STORED, ADDEND, STORE, ORDERED)                                                              \
    COMPUTE(sum_##TYPE, STORED, ADDEND, STORE, PLUS)                                                                  \
    COMPUTE(product_##TYPE, STORED, ADDEND, STORE, TIMES)                                                             \
    CHOOSE(min_##TYPE, STORED, ORDERED, IS_LESS)                                                                      \
    CHOOSE(max_##TYPE, STORED, ORDERED, IS_GREATER)

#define AS_IT_IS(x) (x)
#define SIGNED(x) ((int)(x))
#define SIGNED_LONG(x) ((S64)(x))
#define BF16_TO_FLOAT(x) FLOAT_OF((U32)(x) << 16)
#define FLOAT_TO_BF16(x) round_to_bf16(BITS_OF(x))

FUNCTION U16 round_to_bf16(U32 bits) {
    if ((bits & 0x7fffffff) > 0x7f800000)
        return (U16)(bits >> 16 | 0x40); /* no number, and not infinity by being cut off */
    return (U16)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

REDUCTIONS(f32, U32, FLOAT_OF, BITS_OF, FLOAT_OF)
REDUCTIONS(i32, U32, AS_IT_IS, AS_IT_IS, SIGNED)
REDUCTIONS(i64, U64, AS_IT_IS, AS_IT_IS, SIGNED_LONG)
REDUCTIONS(f16, U16, HALF_TO_FLOAT, FLOAT_TO_HALF, HALF_TO_FLOAT)
REDUCTIONS(bf16, U16, BF16_TO_FLOAT, FLOAT_TO_BF16, BF16_TO_FLOAT)
#ifdef DOUBLE_OF
REDUCTIONS(f64, U64, DOUBLE_OF, LONG_BITS_OF, DOUBLE_OF)
#endif
