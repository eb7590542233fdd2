/* What the ucx transport needs of libucp, in a form that ctypes can call.
 *
 * A channel is one worker with one endpoint and at most one move: spans that are sent, or received, piece by piece as
 * tagged messages, a few of them under way at a time. Both ends cut the same spans into the same pieces and count them,
 * from the same first tag on, and the count is the tag. All calls on one channel come from one thread; only a move's stop flag is written by others:
 * no piece is begun once it is set. Nothing here waits.
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <ucp/api/ucp.h>
#include <uct/api/uct.h>

#define API __attribute__((visibility("default")))
#define PIECES 16 /* under way at a time: enough to keep a link busy */
#define PIECE_BYTES (1u << 20)
#define FLIGHT_BYTES (8u << 20)

/* Exported by libucs of every release we know, but not promised: without it these settings stay as UCX has them. */
extern ucs_status_t ucs_global_opts_set_value(const char *name, const char *value) __attribute__((weak));

struct channel;

typedef struct {
    struct channel *channel;
    uint64_t bytes; /* 0: free */
} slot_t;

typedef struct channel {
    ucp_worker_h worker;
    ucp_ep_h ep;
    int closed;
    ucs_status_t broken;
    /* the move */
    const uint64_t *spans; /* address, bytes; kept by the caller */
    uint64_t count, index, offset;
    uint64_t moved, flying, pieces, tag;
    int receives;
    ucp_mem_h memory;
    int memory_type;
    const volatile int *stop;
    ucs_status_t result;
    slot_t slots[PIECES];
} channel_t;

API const char *kvf_version(void) { return ucp_get_version_string(); }

API const char *kvf_reason(int status) { return ucs_status_string((ucs_status_t)status); }

/* Of the whole process, and before it opens a context. */
API int kvf_process_setting(const char *name, const char *value) {
    return ucs_global_opts_set_value ? ucs_global_opts_set_value(name, value) : UCS_ERR_UNSUPPORTED;
}

/* settings: name, value, name, value, ... A setting that this release lacks is passed over. */
API int kvf_context_new(const char *const *settings, size_t pairs, ucp_context_h *out) {
    ucp_config_t *config;
    ucs_status_t status = ucp_config_read(NULL, NULL, &config);
    if (status != UCS_OK) return status;
    for (size_t i = 0; i < pairs; i++) {
        status = ucp_config_modify(config, settings[2 * i], settings[2 * i + 1]);
        if (status != UCS_OK && status != UCS_ERR_NO_ELEM) {
            ucp_config_release(config);
            return status;
        }
    }
    ucp_params_t params = {.field_mask = UCP_PARAM_FIELD_FEATURES | UCP_PARAM_FIELD_NAME,
                           .features = UCP_FEATURE_TAG | UCP_FEATURE_WAKEUP,
                           .name = "kvferry"};
    status = ucp_init(&params, config, out);
    ucp_config_release(config);
    return status;
}

API void kvf_context_free(ucp_context_h context) { ucp_cleanup(context); }

/* What UCX prints about the context, or about a channel's endpoint where one is given. */
API int kvf_describe(ucp_context_h context, channel_t *channel, char *out, size_t room) {
    char *text = NULL;
    size_t length = 0;
    FILE *stream = open_memstream(&text, &length);
    if (!stream) return UCS_ERR_NO_MEMORY;
    if (channel && channel->ep)
        ucp_ep_print_info(channel->ep, stream);
    else
        ucp_context_print_info(context, stream);
    fclose(stream);
    snprintf(out, room, "%s", text);
    free(text);
    return UCS_OK;
}

/* Which kinds of memory the context can move: bit 0 host, bit 1 CUDA, as ucs_memory_type_t counts them. */
API uint64_t kvf_memory_types(ucp_context_h context) {
    ucp_context_attr_t found = {.field_mask = UCP_ATTR_FIELD_MEMORY_TYPES};
    return ucp_context_query(context, &found) == UCS_OK ? found.memory_types : 0;
}

static void describe_domain(FILE *stream, uct_component_h component, const char *kind, const char *name) {
    uct_md_config_t *config;
    uct_md_h domain;
    uct_md_attr_t found;
    if (uct_md_config_read(component, NULL, NULL, &config) != UCS_OK) return;
    if (uct_md_open(component, name, config, &domain) == UCS_OK) {
        if (uct_md_query(domain, &found) == UCS_OK) {
            int dmabuf = 0;
#if UCP_API_VERSION >= UCP_VERSION(1, 15)
            dmabuf = !!(found.cap.flags & UCT_MD_FLAG_REG_DMABUF);
#endif
            int cuda = !!(found.cap.reg_mem_types & UCS_BIT(UCS_MEMORY_TYPE_CUDA));
            fprintf(stream, "%s %s %d %d\n", kind, name, cuda, dmabuf);
        }
        uct_md_close(domain);
    }
    uct_config_release(config);
}

static void describe_component(FILE *stream, uct_component_h component) {
    uct_component_attr_t found = {.field_mask = UCT_COMPONENT_ATTR_FIELD_NAME |
                                                UCT_COMPONENT_ATTR_FIELD_MD_RESOURCE_COUNT};
    if (uct_component_query(component, &found) != UCS_OK || !found.md_resource_count) return;
    uct_component_attr_t domains = {.field_mask = UCT_COMPONENT_ATTR_FIELD_MD_RESOURCES,
                                    .md_resources = calloc(found.md_resource_count, sizeof(uct_md_resource_desc_t))};
    if (domains.md_resources && uct_component_query(component, &domains) == UCS_OK)
        for (unsigned i = 0; i < found.md_resource_count; i++)
            describe_domain(stream, component, found.name, domains.md_resources[i].md_name);
    free(domains.md_resources);
}

/* A line for each memory domain: component, name, whether it registers memory of CUDA devices, whether dmabufs. */
API int kvf_domains(char *out, size_t room) {
    char *text = NULL;
    size_t length = 0;
    uct_component_h *components;
    unsigned count;
    ucs_status_t status = uct_query_components(&components, &count);
    if (status != UCS_OK) return status;
    FILE *stream = open_memstream(&text, &length);
    for (unsigned i = 0; stream && i < count; i++) describe_component(stream, components[i]);
    uct_release_component_list(components);
    if (!stream) return UCS_ERR_NO_MEMORY;
    fclose(stream);
    snprintf(out, room, "%s", text);
    free(text);
    return UCS_OK;
}

API int kvf_map(ucp_context_h context, void *address, size_t length, int writable, int memory_type, ucp_mem_h *out) {
    unsigned reads = UCP_MEM_MAP_PROT_LOCAL_READ | UCP_MEM_MAP_PROT_REMOTE_READ;
    unsigned writes = UCP_MEM_MAP_PROT_LOCAL_WRITE | UCP_MEM_MAP_PROT_REMOTE_WRITE;
    ucp_mem_map_params_t params = {
        .field_mask = UCP_MEM_MAP_PARAM_FIELD_ADDRESS | UCP_MEM_MAP_PARAM_FIELD_LENGTH | UCP_MEM_MAP_PARAM_FIELD_PROT |
                      UCP_MEM_MAP_PARAM_FIELD_MEMORY_TYPE,
        .memory_type = (ucs_memory_type_t)memory_type,
        .address = address,
        .length = length,
        .prot = writable ? reads | writes : reads};
    return ucp_mem_map(context, &params, out);
}

API void kvf_unmap(ucp_context_h context, ucp_mem_h memory) { ucp_mem_unmap(context, memory); }

API int kvf_channel_new(ucp_context_h context, uint64_t first_tag, channel_t **out, int *event_fd) {
    channel_t *channel = calloc(1, sizeof *channel);
    if (!channel) return UCS_ERR_NO_MEMORY;
    channel->tag = first_tag;
    ucp_worker_params_t params = {.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE,
                                  .thread_mode = UCS_THREAD_MODE_SERIALIZED};
    ucs_status_t status = ucp_worker_create(context, &params, &channel->worker);
    if (status == UCS_OK) {
        status = ucp_worker_get_efd(channel->worker, event_fd);
        if (status != UCS_OK) ucp_worker_destroy(channel->worker);
    }
    if (status != UCS_OK) {
        free(channel);
        return status;
    }
    *out = channel;
    return UCS_OK;
}

API int kvf_channel_address(channel_t *channel, void *out, size_t *room) {
    ucp_address_t *address;
    size_t length;
    ucs_status_t status = ucp_worker_get_address(channel->worker, &address, &length);
    if (status != UCS_OK) return status;
    if (length <= *room) {
        memcpy(out, address, length);
        *room = length;
    } else {
        status = UCS_ERR_BUFFER_TOO_SMALL;
    }
    ucp_worker_release_address(channel->worker, address);
    return status;
}

static void on_error(void *argument, ucp_ep_h ep, ucs_status_t status) {
    (void)ep;
    ((channel_t *)argument)->broken = status;
}

API int kvf_connect(channel_t *channel, const void *address) {
    ucp_ep_params_t params = {.field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE |
                                            UCP_EP_PARAM_FIELD_ERR_HANDLER,
                              .address = address,
                              .err_mode = UCP_ERR_HANDLING_MODE_PEER,
                              .err_handler = {.cb = on_error, .arg = channel}};
    return ucp_ep_create(channel->worker, &params, &channel->ep);
}

API int kvf_broken(channel_t *channel) { return channel->broken; }

static void settle(slot_t *slot, ucs_status_t status) {
    channel_t *channel = slot->channel;
    channel->pieces--;
    channel->flying -= slot->bytes;
    if (status == UCS_OK)
        channel->moved += slot->bytes;
    else if (channel->result == UCS_OK)
        channel->result = status;
    slot->bytes = 0;
}

static void on_sent(void *request, ucs_status_t status, void *argument) {
    settle(argument, status);
    ucp_request_free(request);
}

static void on_received(void *request, ucs_status_t status, const ucp_tag_recv_info_t *info, void *argument) {
    slot_t *slot = argument;
    if (status == UCS_OK && info->length != slot->bytes) status = UCS_ERR_MESSAGE_TRUNCATED;
    settle(slot, status);
    ucp_request_free(request);
}

API void kvf_move(channel_t *channel, const uint64_t *spans, uint64_t count, int receives, ucp_mem_h memory,
                  int memory_type, const volatile int *stop) {
    channel->spans = spans;
    channel->count = count;
    channel->index = channel->offset = channel->moved = 0;
    channel->receives = receives;
    channel->memory = memory;
    channel->memory_type = memory_type;
    channel->stop = stop;
    channel->result = UCS_OK;
}

API uint64_t kvf_moved_bytes(channel_t *channel) { return channel->moved; }

/* UCS_OK when every piece is through, UCS_INPROGRESS before, or why that will not happen. An error does not mean that
 * the memory is untouched from now on: that needs the channel to be freed. */
API int kvf_moved(channel_t *channel) {
    if (channel->result != UCS_OK) return channel->result;
    if (channel->index == channel->count && !channel->pieces) return UCS_OK;
    if (channel->broken != UCS_OK) return channel->broken;
    return *channel->stop || channel->closed ? UCS_ERR_CANCELED : UCS_INPROGRESS;
}

static slot_t *free_slot(channel_t *channel) {
    for (int i = 0; i < PIECES; i++)
        if (!channel->slots[i].bytes) return &channel->slots[i];
    return NULL;
}

static int may_issue(const channel_t *channel) {
    return channel->index < channel->count && channel->result == UCS_OK && channel->broken == UCS_OK &&
           !channel->closed && channel->flying < FLIGHT_BYTES && !*channel->stop;
}

static ucs_status_ptr_t begin(channel_t *channel, slot_t *slot, void *buffer) {
    ucp_request_param_t params = {.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA |
                                                  UCP_OP_ATTR_FIELD_MEMH | UCP_OP_ATTR_FIELD_MEMORY_TYPE,
                                  .user_data = slot,
                                  .memh = channel->memory,
                                  .memory_type = (ucs_memory_type_t)channel->memory_type};
    uint64_t tag = channel->tag++;
    if (!channel->receives) {
        params.cb.send = on_sent;
        return ucp_tag_send_nbx(channel->ep, buffer, slot->bytes, tag, &params);
    }
    /* Always by the callback, which is told the length that came. */
    params.op_attr_mask |= UCP_OP_ATTR_FLAG_NO_IMM_CMPL;
    params.cb.recv = on_received;
    return ucp_tag_recv_nbx(channel->worker, buffer, slot->bytes, tag, UINT64_MAX, &params);
}

static unsigned issue(channel_t *channel) {
    unsigned issued = 0;
    slot_t *slot;
    while (issued < PIECES && may_issue(channel) && (slot = free_slot(channel))) {
        const uint64_t *span = channel->spans + 2 * channel->index;
        uint64_t left = span[1] - channel->offset;
        slot->channel = channel;
        slot->bytes = left < PIECE_BYTES ? left : PIECE_BYTES;
        channel->pieces++;
        channel->flying += slot->bytes;
        uint64_t at = channel->offset;
        channel->offset += slot->bytes;
        if (channel->offset == span[1]) {
            channel->index++;
            channel->offset = 0;
        }
        ucs_status_ptr_t request = begin(channel, slot, (void *)(span[0] + at));
        if (!UCS_PTR_IS_PTR(request)) settle(slot, UCS_PTR_STATUS(request));
        issued++;
    }
    return issued;
}

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec + time.tv_nsec * 1e-9;
}

static unsigned progress(channel_t *channel) {
    return issue(channel) + ucp_worker_progress(channel->worker);
}

/* Go on until there is nothing to do: 0, the event fd will tell; or until `seconds` are over: 1; or an error, < 0. */
API int kvf_turn(channel_t *channel, double seconds) {
    double end = now() + seconds;
    do {
        if (progress(channel)) continue;
        ucs_status_t status = ucp_worker_arm(channel->worker);
        if (status == UCS_ERR_BUSY) continue;
        if (status != UCS_OK) return status;
        /* Some verbs drivers never tell of what came between the last look and the arming, so look again. */
        if (!progress(channel)) return UCS_OK;
    } while (now() < end);
    return 1;
}

/* Close the endpoint at once, whatever is under way on it, which then ends with an error. By force UCX waits for nobody:
 * what the peer has no room for, or does not take, it lets go of. */
API int kvf_close(channel_t *channel) {
    ucp_ep_h ep = channel->ep;
    channel->closed = 1;
    channel->ep = NULL;
    if (!ep) return UCS_OK;
    ucp_request_param_t params = {.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS, .flags = UCP_EP_CLOSE_FLAG_FORCE};
    ucs_status_ptr_t request = ucp_ep_close_nbx(ep, &params);
    if (UCS_PTR_IS_PTR(request)) ucp_request_free(request); /* none that we know makes one */
    return UCS_PTR_IS_ERR(request) ? UCS_PTR_STATUS(request) : UCS_OK;
}

/* Only when closed. The worker goes with every receive that is still posted or half full, so this is what ends the last
 * write to the memory. */
API void kvf_channel_free(channel_t *channel) {
    ucp_worker_destroy(channel->worker);
    free(channel);
}
