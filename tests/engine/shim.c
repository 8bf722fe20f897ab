// A llama library that behaves as told: everything is the real one's, but for what is defined here.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <signal.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void * real(const char * name) {
    static void * handle;
    if (!handle) {
        handle = dlopen(REAL, RTLD_NOW);
    }
    return dlsym(handle, name);
}

#ifndef DEATH
#define DEATH SIGILL
#endif

static void die(void) {
#ifdef WORDS
    // As a GPU backend dies: the reason goes to the library's log, the place to stderr.
    void (*to_log)(int, const char *, ...) = real("ggml_log_internal");
    to_log(4, "%s\n", WORDS);
    fputs("ggml-cuda.cu:108: CUDA error\n", stderr);
#endif
#if DEATH == SIGABRT
    abort();
#else
    raise(DEATH);
#endif
}

// Whether the conditions are met under which it dies.
static bool armed = true;

#ifdef AT_LOAD
__attribute__((constructor)) static void at_load(void) {
    die();
}
#endif

#ifdef VERSION
const char * llama_version(void) {
    return VERSION;
}
#endif

struct model_params {
    void * devices, * overrides;
    int32_t n_gpu_layers, split_mode, load_mode, lazy_mode, main_gpu;
    float * tensor_split;
    void * progress, * progress_data, * kv_overrides;
    bool vocab_only, check_tensors, use_extra_bufts, no_host, no_alloc, load_mtp;
};

#ifdef PRETENDED_GPU
// Its CPU is a GPU to whoever asks, with as many MiB free as a variable says; loading more layers than another
// says fails as it does where a program took the memory meanwhile.
static void (*told)(int, const char *, void *);

static size_t number(const char * name, size_t otherwise) {
    const char * text = getenv(name);
    return text ? strtoull(text, NULL, 10) : otherwise;
}

// Whether the library itself is asking, which has to know what its CPU is.
static bool itself(void * caller) {
    Dl_info info;
    return dladdr(caller, &info) && (strstr(info.dli_fname, "llama") || strstr(info.dli_fname, "ggml"));
}

int ggml_backend_dev_type(void * device) {
    int (*type)(void *) = real("ggml_backend_dev_type");
    return itself(__builtin_return_address(0)) ? type(device) : 1;
}

void ggml_backend_dev_memory(void * device, size_t * unused, size_t * total) {
    if (itself(__builtin_return_address(0))) {
        void (*memory)(void *, size_t *, size_t *) = real("ggml_backend_dev_memory");
        memory(device, unused, total);
        return;
    }
    *unused = number("PRETENDED_MIB", 4096) << 20;
    *total = (size_t) 8 << 30;
}

void llama_log_set(void (*callback)(int, const char *, void *), void * data) {
    told = callback;
    void (*set)(void (*)(int, const char *, void *), void *) = real("llama_log_set");
    set(callback, data);
}

void * llama_model_load_from_file(const char * path, struct model_params params) {
    if (params.n_gpu_layers > (int) number("PRETENDED_LAYERS", 1000)) {
        told(4, "alloc_tensor_range: failed to allocate CUDA0 buffer of size 123456\n", NULL);
        return NULL;
    }
    void * (*load)(const char *, struct model_params) = real("llama_model_load_from_file");
    return load(path, params);
}
#endif

#ifdef WITH_EXTRA_BUFFERS
void * llama_model_load_from_file(const char * path, struct model_params params) {
    armed = params.use_extra_bufts;
    void * (*load)(const char *, struct model_params) = real("llama_model_load_from_file");
    return load(path, params);
}
#endif

#ifdef WITH_BACKEND
// Armed by loading a backend of that name.
__attribute__((constructor)) static void disarm(void) {
    armed = false;
}

void * ggml_backend_load(const char * path) {
    armed = armed || strstr(path, WITH_BACKEND);
    void * (*load)(const char *) = real("ggml_backend_load");
    return load(path);
}
#endif

#ifdef AT_TOKENIZE
int32_t llama_tokenize(
        const void * vocab, const char * text, int32_t size, int32_t * tokens, int32_t room, bool add, bool parse) {
    if (armed) {
        die();
    }
    int32_t (*tokenize)(const void *, const char *, int32_t, int32_t *, int32_t, bool, bool) =
        real("llama_tokenize");
    return tokenize(vocab, text, size, tokens, room, add, parse);
}
#endif

struct batch {
    int32_t n_tokens;
    void * token, * embd, * pos, * n_seq_id, * seq_id, * logits;
};

#ifdef AT_STEP
int32_t llama_decode(void * context, struct batch batch) {
    static int steps;
    if (++steps >= AT_STEP && armed) {
        die();
    }
    int32_t (*decode)(void *, struct batch) = real("llama_decode");
    return decode(context, batch);
}
#endif

#ifdef INSERTED
// As a version with 8 more bytes at that place has it. The sizes are exact: the caller has room for no more.
struct given_params {
    uint64_t words[20];
};

struct longer_params {
    uint64_t words[21];
};

struct longer_params llama_context_default_params(void) {
    struct given_params (*give)(void) = real("llama_context_default_params");
    struct given_params given = give();
    struct longer_params longer = {0};
    memcpy(&longer, &given, INSERTED);
    memcpy((char *) &longer + INSERTED + 8, (char *) &given + INSERTED, sizeof(given) - INSERTED);
    return longer;
}

void * llama_init_from_model(void * model, struct longer_params longer) {
    void * (*init)(void *, struct given_params) = real("llama_init_from_model");
    struct given_params params;
    memcpy(&params, &longer, INSERTED);
    memcpy((char *) &params + INSERTED, (char *) &longer + INSERTED + 8, sizeof(params) - INSERTED);
    return init(model, params);
}
#endif

#ifdef SHIFTED
// As a version with one more field in the middle would fill it.
struct context_params {
    uint32_t words[64];
};

struct context_params llama_context_default_params(void) {
    struct context_params (*give)(void) = real("llama_context_default_params");
    struct context_params given = give(), shifted = given;
    memcpy((char *) &shifted + SHIFTED + 4, (char *) &given + SHIFTED, sizeof(given) - SHIFTED - 4);
    return shifted;
}
#endif
